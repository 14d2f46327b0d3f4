"""The state of a tensor on each dimension of a mesh, and what of it a rank then holds. Pure: no process is asked.

A state is a placement and, for a tensor that every rank holds whole, where its gradient is:

    state       each rank holds                          its gradient on each rank
    replicate   the whole                                the whole
    copy        the whole                                a part of a sum
    shard(d)    its slice of dimension d                 its slice
    partial     a part of a sum (or average)             the whole

With this second column a graph's backward communication follows from its forward states. "copy" is Megatron-core's
copy_to_tensor_model_parallel_region and what JAX calls reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

Shape = tuple[int, ...]


@dataclass(frozen=True)
class State:
    """A tensor's state on one mesh dimension.

    kind
        "replicate", "copy", "shard" or "partial".
    dim
        The tensor dimension that is cut, from 0; shard only.
    op
        "sum" or "avg"; partial only.
    """

    kind: str
    dim: int = -1
    op: str = ""

    @cached_property
    def placement(self) -> Placement:
        """The placement, in torch's words."""
        if self.kind == "shard":
            return Shard(self.dim)
        return Partial(self.op) if self.kind == "partial" else Replicate()

    @cached_property
    def gradient(self) -> Placement:
        """The placement of the gradient."""
        if self.kind == "copy":
            return Partial("sum")
        return Shard(self.dim) if self.kind == "shard" else Replicate()

    def __str__(self) -> str:
        """Return R, C, S(0) or P(sum)."""
        short = {"replicate": "R", "copy": "C"}
        return short.get(self.kind) or (f"S({self.dim})" if self.kind == "shard" else f"P({self.op})")


REPLICATE = State("replicate")
COPY = State("copy")
SUM = State("partial", op="sum")
AVERAGE = State("partial", op="avg")

Layout = tuple[State, ...]
"""One state per mesh dimension."""


def shard(dim: int) -> State:
    """Return the state of a tensor cut along `dim`."""
    return State("shard", dim)


def forward(layout: Layout) -> Layout:
    """Return the layout of the tensor itself: a copy is a replica."""
    return tuple(REPLICATE if state.kind == "copy" else state for state in layout)


def backward(layout: Layout) -> Layout:
    """Return the layout of the gradient."""
    return tuple(_gradient(state) for state in layout)


def _gradient(state: State) -> State:
    if state.kind == "copy":
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
