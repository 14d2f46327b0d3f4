"""How far a result is from the one it should be, in memory that does not grow with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Elements compared at a time: 4 MiB in fp32, of which a few are alive at once.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Difference:
    """How two tensors differ.

    error
        Largest absolute difference over the largest magnitude expected; the largest float where NaN was
        found or nothing but zeros expected.
    scale
        The largest magnitude expected.
    skipped
        Elements not compared, because what is expected of them is not finite.
    """

    error: float
    scale: float
    skipped: int


def difference(found: torch.Tensor, expected: torch.Tensor, rounding: float = 0.0) -> Difference:
    """Compare two tensors; differences up to `rounding` count as none, another shape as the largest error.

    An infinity that was found counts as the dtype's largest number: whether a sum near it overflows
    depends on its order.
    """
    if found.shape != expected.shape:
        return Difference(sys.float_info.max, 0.0, 0)
    maxima = [_maxima(*block) for block in _blocks(found, expected)]
    if not maxima:
        return Difference(0.0, 0.0, 0)
    apart, scale, skipped = (column.tolist() for column in torch.stack(maxima).double().cpu().unbind(1))
    largest, magnitude = max(max(apart) - rounding, 0.0), max(scale)
    error = min(largest / magnitude if magnitude else math.inf, sys.float_info.max) if largest else 0.0
    return Difference(error, magnitude, int(sum(skipped)))


def worst_place(found: torch.Tensor, expected: torch.Tensor) -> tuple[list[int], float, float]:
    """Return where two tensors differ most, and what is found and expected there."""
    apart = [_apart(*block).max(0) for block in _blocks(found, expected)]
    number = int(torch.stack([largest for largest, _ in apart]).argmax())
    flat = number * BLOCK + int(apart[number][1])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), found.shape)]
    place = tuple(index)
    return index, float(found[place]), float(expected[place])


def default_limit(dtype: torch.dtype) -> float:
    """Return the error allowed where nobody says: 2 %, the published bound, for 16 bits, else 1e-6."""
    return 2e-2 if dtype.itemsize <= 2 else 1e-6


def _blocks(found: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut both into flat blocks of a dtype in which their difference can be told."""
    if found.numel() == 0:
        return
    wide = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float32)
    bound = torch.finfo(found.dtype).max
    for mine, theirs in zip(*(torch.split(tensor.reshape(-1), BLOCK) for tensor in (found, expected)), strict=True):
        yield mine.to(wide).nan_to_num(nan=torch.inf, posinf=bound, neginf=-bound), theirs.to(wide)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found - expected).abs_().masked_fill_(~expected.isfinite(), 0)


def _maxima(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, the largest magnitude expected, and how many elements are not finite."""
    unusable = ~expected.isfinite()
    scale = expected.abs().masked_fill_(unusable, 0).max()
    return torch.stack([_apart(found, expected).max(), scale, unusable.sum().to(expected.dtype)])
