"""The placement of a tensor on each dimension of a mesh, and the part that a rank holds. Pure: needs no process.

A placement says which part of the tensor, and which part of its gradient, each rank holds:

    placement      tensor                         gradient
    replicate      the whole tensor               the whole gradient
    partial_grad   the whole tensor               a term of a sum
    shard(d)       a slice of dimension d         the same slice
    partial        a term of a sum or average     the whole gradient

The last column determines a graph's backward communication from its forward placements. "partial_grad" is the
input of Megatron-core's copy_to_tensor_model_parallel_region; JAX calls it reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch.distributed import tensor as dtensor
from torch.distributed.tensor import Partial, Replicate, Shard

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The placement of a tensor and its gradient on one mesh dimension.

    kind
        "replicate", "partial_grad", "shard" or "partial".
    dim
        The sharded tensor dimension, from 0; shard only.
    op
        "sum" or "avg"; partial only.
    """

    kind: str
    dim: int = -1
    op: str = ""

    @cached_property
    def placement(self) -> dtensor.Placement:
        """The tensor's placement as torch's class."""
        if self.kind == "shard":
            return Shard(self.dim)
        return Partial(self.op) if self.kind == "partial" else Replicate()

    def __str__(self) -> str:
        """Return R, R* (the gradient is partial), S(0) or P(sum)."""
        short = {"replicate": "R", "partial_grad": "R*"}
        return short.get(self.kind) or (f"S({self.dim})" if self.kind == "shard" else f"P({self.op})")


REPLICATE = Placement("replicate")
PARTIAL_GRAD = Placement("partial_grad")
SUM = Placement("partial", op="sum")
AVERAGE = Placement("partial", op="avg")

Layout = tuple[Placement, ...]
"""One placement per mesh dimension."""


def shard(dim: int) -> Placement:
    """Return the placement of a tensor that is sharded along `dim`."""
    return Placement("shard", dim)


def text(layout: Layout) -> str:
    """Return a layout such as "S(0) R"."""
    return " ".join(map(str, layout))


def with_placement(layout: Layout, mesh_dim: int, placement: Placement) -> Layout:
    """Return the layout with another placement on a mesh dimension."""
    return (*layout[:mesh_dim], placement, *layout[mesh_dim + 1 :])


def forward(layout: Layout) -> Layout:
    """Return the layout of the tensor alone: partial_grad becomes replicate."""
    return tuple(REPLICATE if placement.kind == "partial_grad" else placement for placement in layout)


def backward(layout: Layout) -> Layout:
    """Return the layout of the gradient."""
    gradients = {"partial_grad": SUM, "partial": REPLICATE}
    return tuple(gradients.get(placement.kind, placement) for placement in layout)


def cuts(layout: Layout, mesh_shape: Sequence[int], dims: int) -> list[int]:
    """Return the number of slices of each of `dims` tensor dimensions."""
    counts = [1] * dims
    for placement, size in zip(layout, mesh_shape, strict=True):
        if placement.kind == "shard":
            counts[placement.dim] *= size
    return counts


def is_even(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Tell whether the slices of all ranks have the same shape, and are not empty."""
    counts = cuts(layout, mesh_shape, len(shape))
    return all(count == 1 or (size and size % count == 0) for size, count in zip(shape, counts, strict=True))


def bounds(shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rank's [start, stop) of every tensor dimension.

    Where several mesh dimensions shard one tensor dimension, the first of them shards it, and the next shards the
    slices. Slices are those of torch.chunk: ceil(size / count) long, the last slices shorter or empty.
    """
    ranges = [(0, size) for size in shape]
    for placement, count, place in zip(layout, mesh_shape, coordinate, strict=True):
        if placement.kind == "shard":
            start, stop = ranges[placement.dim]
            length = -((start - stop) // count)
            ranges[placement.dim] = min(start + place * length, stop), min(start + (place + 1) * length, stop)
    return ranges


def local_shape(shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Shape:
    """Return the shape of the rank's local tensor."""
    return tuple(stop - start for start, stop in bounds(shape, layout, mesh_shape, coordinate))


def largest_local_shape(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> Shape:
    """Return the shape of the first rank's local tensor; no rank has more."""
    return local_shape(shape, layout, mesh_shape, (0,) * len(mesh_shape))


def local_size(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> int:
    """Return the number of elements of the first rank's local tensor; no rank has more."""
    return prod(largest_local_shape(shape, layout, mesh_shape))
