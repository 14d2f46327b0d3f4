"""What differs between two sets of tensors, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ascend_parallel.sharding.layout import Shape

Kind = tuple[Shape, torch.dtype]
"""A whole tensor's shape and dtype."""

MOST_SHOWN = 10


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or loaded, and what differs or is damaged."""


def differences(
    wanted: Mapping[str, Kind], found: Mapping[str, Kind], here: str = "here", there: str = "in the checkpoint"
) -> list[str]:
    """Return a line for every tensor that is in one only, or of another shape or dtype."""
    lines = [f"{name}: {here}, not {there}" for name in wanted if name not in found]
    lines += [f"{name}: {there}, not {here}" for name in found if name not in wanted]
    for name in (name for name in wanted if name in found):
        (shape, dtype), (other, other_dtype) = wanted[name], found[name]
        if shape != other:
            lines.append(f"{name}: shape {list(shape)} {here}, {list(other)} {there}")
        if dtype != other_dtype:
            lines.append(f"{name}: {dtype_name(dtype)} {here}, {dtype_name(other_dtype)} {there}")
    return lines


def refuse(lines: Sequence[str], why: str) -> None:
    """Raise `CheckpointError` with the first lines, if there is one."""
    if lines:
        rest = f"\n  and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
        raise CheckpointError(f"{why}:\n  " + "\n  ".join(lines[:MOST_SHOWN]) + rest)


def in_words(error: BaseException) -> str:
    """Return what an error says; of what is not said by us also what it is."""
    return str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return float32 of torch.float32."""
    return str(dtype).removeprefix("torch.")
