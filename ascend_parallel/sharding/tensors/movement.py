"""Runs a redistribution's steps on what a rank holds: each collective by its own name, along one mesh dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.collectives import all_gather_single, reduce_scatters
from ascend_parallel.sharding.layout import Layout, Shape, bounds
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.tensors.costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, sent
from ascend_parallel.sharding.tensors.redistribution import HOLD, PAD, SCALE, SLICE, Redistribution, Step

REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass(frozen=True)
class Moved:
    """A collective that ran, or a message: kind, mesh dimension (-1 across meshes) and the bytes this rank sent."""

    kind: str
    mesh_dim: int
    nbytes: float


_RECORD: ContextVar[list[Moved] | None] = ContextVar("moved", default=None)


@contextmanager
def recorded() -> Iterator[list[Moved]]:
    """Collect what this thread's redistributions send while the context is open."""
    moved: list[Moved] = []
    token = _RECORD.set(moved)
    try:
        yield moved
    finally:
        _RECORD.reset(token)


def note(kind: str, mesh_dim: int, nbytes: float) -> None:
    """Add to the record, if there is one."""
    record = _RECORD.get()
    if record is not None:
        record.append(Moved(kind, mesh_dim, nbytes))


@dataclass(frozen=True)
class _Line:
    """This rank's line along a mesh dimension, and what it has of the tensor before and after a step.

    order
        The places of the group's ranks, in the group's order.
    """

    mesh: ProcessMesh
    dim: int
    place: int
    order: list[int]
    before: Shape
    after: Shape

    @property
    def ranks(self) -> int:
        """Ranks of the line."""
        return self.mesh.shape[self.dim]

    @property
    def group(self) -> dist.ProcessGroup:
        """The line's group."""
        return self.mesh.group(self.dim)

    def by_group(self, by_place: torch.Tensor) -> torch.Tensor:
        """Bring one row for each place into the group's order."""
        return by_place if self.order == sorted(self.order) else by_place[self.order]

    def by_place(self, by_group: torch.Tensor) -> torch.Tensor:
        """Bring one row for each of the group's ranks into the order of their places."""
        return (
            by_group if self.order == sorted(self.order) else by_group[[self.order.index(i) for i in range(self.ranks)]]
        )

    def piece(self, size: int) -> int:
        """Return the size of the largest of the line's pieces."""
        return -(-size // self.ranks)


def move(local: torch.Tensor, shape: Sequence[int], mesh: ProcessMesh, redistribution: Redistribution) -> torch.Tensor:
    """Bring this rank's part of a tensor from one layout to another.

    local
        What this rank holds in the source layout; a rank that is not in the mesh gets it back unchanged.
    shape
        Of the whole tensor.

    Every rank of the mesh has to call it. Does not differentiate. The result may be a view of `local`.
    """
    place = mesh.coordinate(dist.get_rank())
    if place is None:
        return local
    layout = redistribution.source
    for step in redistribution.steps:
        local, layout = run(step, local, tuple(shape), layout, mesh, place)
    return local


def run(
    step: Step, local: torch.Tensor, shape: Shape, layout: Layout, mesh: ProcessMesh, place: Sequence[int]
) -> tuple[torch.Tensor, Layout]:
    """Run one step from `layout` for the rank at coordinate `place`; return its part and the layout after."""
    dim = step.mesh_dim
    after = (*layout[:dim], step.target, *layout[dim + 1 :])
    extents = [tuple(stop - start for start, stop in bounds(shape, one, mesh.shape, place)) for one in (layout, after)]
    line = _Line(mesh, dim, place[dim], mesh.places_in_group(dim, place), *extents)
    return STEPS[step.kind](local, step, line), after


def _all_gather(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    dim = step.source.dim
    size = line.after[dim]
    x_piece = _padded(local.movedim(dim, 0), line.piece(size))
    if not x_piece.numel() or line.ranks == 1:
        return _padded(x_piece, line.ranks * x_piece.shape[0])[:size].movedim(0, dim)
    whole = x_piece.new_empty(line.ranks * x_piece.shape[0], *x_piece.shape[1:])
    note(ALL_GATHER, line.dim, sent(ALL_GATHER, _nbytes(whole), line.ranks))
    all_gather_single(whole, x_piece, line.group).wait()
    whole = line.by_place(whole.view(line.ranks, *x_piece.shape)).flatten(0, 1)
    return whole[:size].movedim(0, dim)


def _all_reduce(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    if total.numel() and line.ranks > 1:
        note(ALL_REDUCE, line.dim, sent(ALL_REDUCE, _nbytes(total), line.ranks))
        dist.all_reduce(total, op=REDUCTIONS[step.source.op], group=line.group)
    return _averaged(total, step, line)


def _reduce_scatter(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    dim = step.target.dim
    piece = line.piece(line.before[dim])
    x = _padded(local.movedim(dim, 0), line.ranks * piece)
    own = x.new_empty(piece, *x.shape[1:])
    if line.ranks == 1 or not x.numel():
        own = x[:piece].clone()
    else:
        note(REDUCE_SCATTER, line.dim, sent(REDUCE_SCATTER, _nbytes(x), line.ranks))
        x = line.by_group(x.reshape(line.ranks, *own.shape)).contiguous()
        own = _reduced_slice(x, own, step.source.op, line.group)
    return _averaged(own[: line.after[dim]].movedim(0, dim), step, line)


def _reduced_slice(x: torch.Tensor, own: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the reduction over ranks of the row of `x`, one for each rank, that is this rank's; `own` is for it."""
    if REDUCTIONS[op] == dist.ReduceOp.SUM:
        (scatter,) = reduce_scatters(own, (own.shape[0],), group)
        scatter.expect()
        scatter.start(x.flatten(0, 1)).wait()
        return own
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group)
    return parts.amax(0) if op == "max" else parts.amin(0)


def _all_to_all(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    joined, cut = step.source.dim, step.target.dim
    size, piece = line.after[joined], line.piece(line.before[cut])
    # [cut, joined, ...]: the rows of `cut` that each rank receives lie together
    x = _padded(local.movedim((cut, joined), (0, 1)), line.ranks * piece)
    x = _padded(x.transpose(0, 1), line.piece(size)).transpose(0, 1)
    blocks = x.reshape(line.ranks, piece, *x.shape[1:])  # [rank, cut, joined, ...]
    if x.numel() and line.ranks > 1:
        note(ALL_TO_ALL, line.dim, sent(ALL_TO_ALL, line.ranks * _nbytes(x), line.ranks))
        blocks = line.by_group(blocks).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=line.group)
        blocks = line.by_place(received)
    whole = blocks.transpose(0, 1).flatten(1, 2)
    return whole[: line.after[cut], :size].movedim((0, 1), (cut, joined))


def _slice(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    dim = step.target.dim
    size = line.before[dim]
    return local.narrow(dim, min(line.place * line.piece(size), size), line.after[dim])


def _hold(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    return torch.zeros_like(local) if step.target.op == "sum" and line.place else local


def _pad(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    dim, op = step.source.dim, step.target.op
    whole = local.new_full(line.after, neutral(op, local.dtype))
    start = min(line.place * line.piece(line.after[dim]), line.after[dim])
    whole.narrow(dim, start, line.before[dim]).copy_(local * line.ranks if op == "avg" else local)
    return whole


def _scale(local: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    return local * line.ranks if step.target.op == "avg" else local / line.ranks


STEPS: dict[str, Callable[[torch.Tensor, Step, _Line], torch.Tensor]] = {
    ALL_GATHER: _all_gather,
    ALL_REDUCE: _all_reduce,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
    SLICE: _slice,
    HOLD: _hold,
    PAD: _pad,
    SCALE: _scale,
}


def neutral(op: str, dtype: torch.dtype) -> float:
    """Return what changes nothing when it is reduced with anything."""
    if op in ("sum", "avg"):
        return 0
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    if dtype == torch.bool:
        return op == "min"
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `x` with zeros after it so that it has `rows` rows."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _averaged(total: torch.Tensor, step: Step, line: _Line) -> torch.Tensor:
    return total / line.ranks if step.source.op == "avg" else total


def _nbytes(x: torch.Tensor) -> int:
    return prod(x.shape) * x.element_size()
