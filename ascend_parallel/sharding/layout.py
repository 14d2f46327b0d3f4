"""The placement of a tensor on each dimension of a mesh, and the part that a rank holds. Pure: no process is asked.

A placement says what each rank holds of the tensor, and of its gradient:

    placement      the tensor                     its gradient
    replicate      the whole                      the whole
    partial_grad   the whole                      a term of a sum
    shard(d)       its slice of dimension d       its slice
    partial        a term of a sum or average     the whole

The second column makes a graph's backward communication follow from its forward placements. "partial_grad" is the
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
        The tensor dimension that is cut, from 0; shard only.
    op
        "sum" or "avg"; partial only.
    """

    kind: str
    dim: int = -1
    op: str = ""

    @cached_property
    def placement(self) -> dtensor.Placement:
        """The placement, in torch's words."""
        if self.kind == "shard":
            return Shard(self.dim)
        return Partial(self.op) if self.kind == "partial" else Replicate()

    @cached_property
    def gradient(self) -> dtensor.Placement:
        """The placement of the gradient."""
        if self.kind == "partial_grad":
            return Partial("sum")
        return Shard(self.dim) if self.kind == "shard" else Replicate()

    def __str__(self) -> str:
        """Return R, R/P (the gradient is partial), S(0) or P(sum)."""
        short = {"replicate": "R", "partial_grad": "R/P"}
        return short.get(self.kind) or (f"S({self.dim})" if self.kind == "shard" else f"P({self.op})")


REPLICATE = Placement("replicate")
PARTIAL_GRAD = Placement("partial_grad")
SUM = Placement("partial", op="sum")
AVERAGE = Placement("partial", op="avg")

Layout = tuple[Placement, ...]
"""One placement per mesh dimension."""


def shard(dim: int) -> Placement:
    """Return the state of a tensor cut along `dim`."""
    return Placement("shard", dim)


def forward(layout: Layout) -> Layout:
    """Return the layout of the tensor alone, without its gradient's."""
    return tuple(REPLICATE if state.kind == "partial_grad" else state for state in layout)


def backward(layout: Layout) -> Layout:
    """Return the layout of the gradient."""
    return tuple(_gradient(state) for state in layout)


def _gradient(state: Placement) -> Placement:
    if state.kind == "partial_grad":
        return SUM
    return REPLICATE if state.kind == "partial" else state


def cuts(layout: Layout, mesh_shape: Sequence[int], dims: int) -> list[int]:
    """Return into how many pieces each of `dims` tensor dimensions is cut."""
    found = [1] * dims
    for state, size in zip(layout, mesh_shape, strict=True):
        if state.kind == "shard":
            found[state.dim] *= size
    return found


def is_even(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Tell whether every rank's slice is of the same shape, and not empty."""
    pieces = cuts(layout, mesh_shape, len(shape))
    return all(count == 1 or (size and size % count == 0) for size, count in zip(shape, pieces, strict=True))


def bounds(shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rank's [start, stop) of every tensor dimension.

    A dimension cut by several mesh dimensions is cut by the first of them, its pieces by the next. Pieces are as
    torch.chunk's: all but the last of ceil(size / count), and empty ones at the end.
    """
    found = [(0, size) for size in shape]
    for state, count, place in zip(layout, mesh_shape, coordinate, strict=True):
        if state.kind == "shard":
            start, stop = found[state.dim]
            piece = -((start - stop) // count)
            found[state.dim] = min(start + place * piece, stop), min(start + (place + 1) * piece, stop)
    return found


def local_shape(shape: Shape, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Shape:
    """Return the shape of what the rank holds."""
    return tuple(stop - start for start, stop in bounds(shape, layout, mesh_shape, coordinate))


def local_size(shape: Shape, layout: Layout, mesh_shape: Sequence[int]) -> int:
    """Return the elements that the first rank holds, who holds as many as any."""
    return prod(local_shape(shape, layout, mesh_shape, [0] * len(mesh_shape)))
