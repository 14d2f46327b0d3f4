"""Describe how two sets of tensors differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ascend_parallel.sharding.layout import Shape
from ascend_parallel.text import dtype_name

Kind = tuple[Shape, torch.dtype]
"""A whole tensor's shape and dtype."""

MOST_SHOWN = 10


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the message says what differs or is damaged."""


def differences(
    mine: Mapping[str, Kind], theirs: Mapping[str, Kind], here: str = "here", there: str = "in the checkpoint"
) -> list[str]:
    """Return a line for every tensor that only one side has, or whose shape or dtype differs."""
    lines = [f"{name}: {here}, not {there}" for name in mine if name not in theirs]
    lines += [f"{name}: {there}, not {here}" for name in theirs if name not in mine]
    for name in (name for name in mine if name in theirs):
        (shape, dtype), (other_shape, other_dtype) = mine[name], theirs[name]
        if shape != other_shape:
            lines.append(f"{name}: shape {list(shape)} {here}, {list(other_shape)} {there}")
        if dtype != other_dtype:
            lines.append(f"{name}: {dtype_name(dtype)} {here}, {dtype_name(other_dtype)} {there}")
    return lines


def refuse(lines: Sequence[str], why: str) -> None:
    """Raise `CheckpointError` with `why` and the first `MOST_SHOWN` lines; do nothing if `lines` is empty."""
    if lines:
        rest = f"\n  and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
        raise CheckpointError(f"{why}:\n  " + "\n  ".join(lines[:MOST_SHOWN]) + rest)


def in_words(error: BaseException) -> str:
    """Return an error's message, with the error's type unless the error is ours."""
    return str(error) if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {error}"
