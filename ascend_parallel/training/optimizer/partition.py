"""Which rank updates which part of a parameter. Pure, and alike on all ranks.

"slices" (weights sharding): each parameter is cut along its longest dimension as torch.chunk cuts: any size goes, later
slices are smaller or missing. "parameters" (weights grouping): each parameter is one rank's, the largest first to the
rank that has the least so far. Slices are boxes, so that the optimizer's state can be kept and loaded in the
coordinates of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ascend_parallel.sharding.layout import Shape

BY = ("slices", "parameters")


@dataclass(frozen=True)
class ShardBounds:
    """A part of a tensor: where it starts on each dimension, and its shape."""

    offsets: tuple[int, ...]
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements, at least one."""
        return prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of `tensor` that this is."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))]


Division = tuple[ShardBounds | None, ...]
"""The box of each rank; None: nothing."""


def whole(shape: Shape) -> ShardBounds:
    """Return the box of everything."""
    return ShardBounds((0,) * len(shape), tuple(shape))


def divide(shapes: Sequence[Shape], ranks: int, by: str) -> list[Division]:
    """Return, for each parameter, the box of each of `ranks` ranks. What has no dimension is one rank's, whole."""
    divisions: list[Division] = [(None,) * ranks] * len(shapes)
    load = [0] * ranks
    undivided = []
    for index, shape in enumerate(shapes):
        if by == "slices" and shape and ranks > 1:
            divisions[index] = _slices(shape, ranks)
            load = [held + (box.size if box else 0) for held, box in zip(load, divisions[index], strict=True)]
        elif prod(shape):
            undivided.append(index)
    for index in sorted(undivided, key=lambda index: (-prod(shapes[index]), index)):
        owner = load.index(min(load))
        load[owner] += prod(shapes[index])
        divisions[index] = tuple(whole(shapes[index]) if rank == owner else None for rank in range(ranks))
    return divisions


def _slices(shape: Shape, ranks: int) -> Division:
    dim = shape.index(max(shape))
    width = -(-shape[dim] // ranks)
    return tuple(_slice(shape, dim, min(rank * width, shape[dim]), width) for rank in range(ranks))


def _slice(shape: Shape, dim: int, start: int, width: int) -> ShardBounds | None:
    size = min(width, shape[dim] - start)
    offsets = tuple(start if other == dim else 0 for other in range(len(shape)))
    box = ShardBounds(offsets, (*shape[:dim], size, *shape[dim + 1 :]))
    return box if box.size else None
