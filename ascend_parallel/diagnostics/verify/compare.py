"""Compare a tensor with the expected tensor, block by block, in memory independent of their size."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Elements per block: 4 MiB in fp32; a few temporaries of this size are alive at a time.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors.

    error
        Largest absolute difference / largest expected magnitude; the largest float if the actual tensor has a NaN, or
        if all expected values are 0 and the actual ones are not.
    scale
        The largest expected magnitude.
    skipped
        Number of elements that are not compared because their expected value is not finite.
    """

    error: float
    scale: float
    skipped: int


def difference(actual: torch.Tensor, expected: torch.Tensor, rounding: float = 0.0) -> Difference:
    """Return the difference of two tensors; differences up to `rounding` count as 0, unequal shapes as the maximum.

    An actual infinity counts as the dtype's largest number: the order of a sum near that number decides whether the
    sum overflows.
    """
    if actual.shape != expected.shape:
        return Difference(sys.float_info.max, 0.0, 0)
    maxima = [_maxima(*block) for block in _blocks(actual, expected)]
    if not maxima:
        return Difference(0.0, 0.0, 0)
    apart, scale, skipped = (column.tolist() for column in torch.stack(maxima).double().cpu().unbind(1))
    largest, magnitude = max(max(apart) - rounding, 0.0), max(scale)
    error = min(largest / magnitude if magnitude else math.inf, sys.float_info.max) if largest else 0.0
    return Difference(error, magnitude, int(sum(skipped)))


def worst_place(actual: torch.Tensor, expected: torch.Tensor) -> tuple[list[int], float, float]:
    """Return the index of the largest difference, and the actual and the expected value there."""
    apart = [_apart(*block).max(0) for block in _blocks(actual, expected)]
    number = int(torch.stack([largest for largest, _ in apart]).argmax())
    flat = number * BLOCK + int(apart[number][1])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape)]
    place = tuple(index)
    return index, float(actual[place]), float(expected[place])


def default_limit(dtype: torch.dtype) -> float:
    """Return the default of the allowed error: 2 %, the published bound, for 16-bit dtypes, otherwise 1e-6."""
    return 2e-2 if dtype.itemsize <= 2 else 1e-6


def _blocks(actual: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of flat blocks of both tensors in a dtype wide enough for their difference."""
    if actual.numel() == 0:
        return
    wide = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    bound = torch.finfo(actual.dtype).max
    for left, right in zip(*(torch.split(tensor.reshape(-1), BLOCK) for tensor in (actual, expected)), strict=True):
        yield left.to(wide).nan_to_num(nan=torch.inf, posinf=bound, neginf=-bound), right.to(wide)


def _apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (actual - expected).abs_().masked_fill_(~expected.isfinite(), 0)


def _maxima(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, the largest expected magnitude and the number of non-finite expected elements."""
    unusable = ~expected.isfinite()
    scale = expected.abs().masked_fill_(unusable, 0).max()
    return torch.stack([_apart(actual, expected).max(), scale, unusable.sum().to(expected.dtype)])
