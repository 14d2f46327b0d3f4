"""Partition parameters among ranks. Pure, with the same result on all ranks.

"slices" (weights sharding): each parameter is cut along its longest dimension as torch.chunk cuts. Any size works;
later slices are smaller or missing. "parameters" (weights grouping): each parameter belongs to one rank, the largest
first to the rank that has the least so far. Slices are rectangular, so the optimizer's state can be saved and loaded
in the coordinates of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ascend_parallel.sharding.layout import Shape

PARTITIONS = ("slices", "parameters")


@dataclass(frozen=True)
class ShardBounds:
    """Where a shard lies in a tensor: its start on each dimension, and its shape."""

    offsets: tuple[int, ...]
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements, at least 1."""
        return prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of `tensor` inside these bounds."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))]


Partition = tuple[ShardBounds | None, ...]
"""The bounds of each rank's shard; None: the rank has no shard."""


def full_bounds(shape: Shape) -> ShardBounds:
    """Return the bounds of a whole tensor."""
    return ShardBounds((0,) * len(shape), tuple(shape))


def partition(shapes: Sequence[Shape], ranks: int, partition_by: str) -> list[Partition]:
    """Return, for each parameter, the bounds of the shard of each of `ranks` ranks.

    A parameter without dimensions belongs to one rank.
    """
    partitions: list[Partition] = [(None,) * ranks] * len(shapes)
    load = [0] * ranks
    uncut = []
    for index, shape in enumerate(shapes):
        if partition_by == "slices" and shape and ranks > 1:
            partitions[index] = _slices(shape, ranks)
            load = [
                elements + (bounds.size if bounds else 0)
                for elements, bounds in zip(load, partitions[index], strict=True)
            ]
        elif prod(shape):
            uncut.append(index)
    for index in sorted(uncut, key=lambda index: (-prod(shapes[index]), index)):
        owner = load.index(min(load))
        load[owner] += prod(shapes[index])
        partitions[index] = tuple(full_bounds(shapes[index]) if rank == owner else None for rank in range(ranks))
    return partitions


def _slices(shape: Shape, ranks: int) -> Partition:
    dim = shape.index(max(shape))
    width = -(-shape[dim] // ranks)
    return tuple(_slice(shape, dim, min(rank * width, shape[dim]), width) for rank in range(ranks))


def _slice(shape: Shape, dim: int, start: int, width: int) -> ShardBounds | None:
    size = min(width, shape[dim] - start)
    offsets = tuple(start if index == dim else 0 for index in range(len(shape)))
    bounds = ShardBounds(offsets, (*shape[:dim], size, *shape[dim + 1 :]))
    return bounds if bounds.size else None
