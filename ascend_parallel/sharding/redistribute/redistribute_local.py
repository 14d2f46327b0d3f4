"""Runs the steps of a redistribution on a rank's local tensor, each along one mesh dimension.

A redistribution is a generator: it yields each collective as a `Request` (collectives.py) and continues when the
collective is done. The caller decides when a collective runs, and with which other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from ascend_parallel.sharding.layout import Shape, local_shape, with_placement
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.collectives import Request
from ascend_parallel.sharding.redistribute.shortest_path import (
    HOLD,
    PAD,
    SCALE,
    SLICE,
    RedistributeStep,
    Redistribution,
)

Observer = Callable[[RedistributeStep], None]
RequestGenerator = Generator[Request, None, torch.Tensor]
"""Yields the collectives in order, and returns the rank's local tensor in the target layout."""


@dataclass(frozen=True)
class MeshDimStep:
    """A step of a redistribution on this rank: its line along the step's mesh dimension, and its local shapes.

    place
        This rank's index along the line.
    order
        The indices along the line of the group's ranks, in group order.
    before, after
        The local shapes before and after the step.
    """

    mesh: ProcessMesh
    step: RedistributeStep
    place: int
    order: list[int]
    before: Shape
    after: Shape

    @property
    def ranks(self) -> int:
        """The number of ranks on the line."""
        return self.mesh.shape[self.step.mesh_dim]

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The line's process group."""
        return self.mesh.group(self.step.mesh_dim)

    @cached_property
    def ascends(self) -> bool:
        """Whether the group's ranks are in the order along the line."""
        return self.order == sorted(self.order)

    def by_group(self, by_place: torch.Tensor) -> torch.Tensor:
        """Reorder rows from the order along the line into group order."""
        return by_place if self.ascends else by_place[self.order]

    def by_place(self, by_group: torch.Tensor) -> torch.Tensor:
        """Reorder rows from group order into the order along the line."""
        return by_group if self.ascends else by_group[[self.order.index(place) for place in range(self.ranks)]]

    def piece(self, size: int) -> int:
        """Return the size of the largest slice on the line, ceil(size / ranks)."""
        return -(-size // self.ranks)


def redistribute_local(
    local: torch.Tensor, shape: Sequence[int], mesh: ProcessMesh, redistribution: Redistribution
) -> torch.Tensor:
    """Return this rank's local tensor in the target layout of `redistribution`.

    local
        This rank's local tensor in the source layout. A rank outside the mesh gets `local` back unchanged.
    shape
        The global shape of the tensor.

    Every rank of the mesh must call this function. Not differentiable. The result may be a view of `local`.
    """
    return finish_redistribute(redistribute_requests(local, lines_of(tuple(shape), mesh, redistribution)))


def finish_redistribute(requests: RequestGenerator) -> torch.Tensor:
    """Run the remaining collectives of a redistribution, each to its end, and return the rank's local tensor."""
    while True:
        try:
            request = next(requests)
        except StopIteration as stop:
            tensor: torch.Tensor = stop.value
            return tensor
        request.start().wait()


def lines_of(shape: Shape, mesh: ProcessMesh, redistribution: Redistribution) -> tuple[MeshDimStep, ...]:
    """Return a line for each step of a redistribution of a tensor of global `shape`; none outside of the mesh."""
    place = mesh.coordinate(dist.get_rank())
    lines: list[MeshDimStep] = []
    layout = redistribution.source
    for step in redistribution.steps if place is not None else ():
        assert place is not None
        dim = step.mesh_dim
        after = with_placement(layout, dim, step.target)
        shapes = [local_shape(shape, ends, mesh.shape, place) for ends in (layout, after)]
        lines.append(MeshDimStep(mesh, step, place[dim], mesh.places_in_group(dim, place), shapes[0], shapes[1]))
        layout = after
    return tuple(lines)


def redistribute_requests(
    local: torch.Tensor, lines: Sequence[MeshDimStep], observer: Observer | None = None
) -> RequestGenerator:
    """Run `redistribute_local` as a generator of its collectives; `observer` is called with each step at its start."""
    for line in lines:
        if line.step.kind in LOCAL_STEPS:
            local = LOCAL_STEPS[line.step.kind](local, line)
        else:
            local = yield from COLLECTIVE_STEPS[line.step.kind](local, line, observer)
    return local


def _all_gather(local: torch.Tensor, line: MeshDimStep, observer: Observer | None) -> RequestGenerator:
    dim = line.step.source.dim
    size = line.after[dim]
    x_piece = _padded(local.movedim(dim, 0), line.piece(size))
    if not x_piece.numel() or line.ranks == 1:
        return _padded(x_piece, line.ranks * x_piece.shape[0])[:size].movedim(0, dim)
    request = Request(line.step, line.group, x_piece.contiguous()[None], observer)
    yield request
    whole = line.by_place(request.result).flatten(0, 1)
    return whole[:size].movedim(0, dim)


def _all_reduce(local: torch.Tensor, line: MeshDimStep, observer: Observer | None) -> RequestGenerator:
    if local.numel() and line.ranks > 1:
        request = Request(line.step, line.group, local[None], observer)
        yield request
        total = request.result[0]
    else:
        total = local.clone(memory_format=torch.contiguous_format)
    return _averaged(total, line)


def _reduce_scatter(local: torch.Tensor, line: MeshDimStep, observer: Observer | None) -> RequestGenerator:
    dim = line.step.target.dim
    piece = line.piece(line.before[dim])
    x = _padded(local.movedim(dim, 0), line.ranks * piece)
    if line.ranks == 1 or not x.numel():
        own = x[:piece].clone()
    else:
        x = line.by_group(x.reshape(line.ranks, piece, *x.shape[1:])).contiguous()
        request = Request(line.step, line.group, x, observer)
        yield request
        own = request.result[0]
    return _averaged(own[: line.after[dim]].movedim(0, dim), line)


def _all_to_all(local: torch.Tensor, line: MeshDimStep, observer: Observer | None) -> RequestGenerator:
    joined, cut = line.step.source.dim, line.step.target.dim
    size, piece = line.after[joined], line.piece(line.before[cut])
    # [cut, joined, ...]: the rows of `cut` that a rank receives are contiguous
    x = _padded(local.movedim((cut, joined), (0, 1)), line.ranks * piece)
    x = _padded(x.transpose(0, 1), line.piece(size)).transpose(0, 1)
    blocks = x.reshape(line.ranks, piece, *x.shape[1:])  # [rank, cut, joined, ...]
    if x.numel() and line.ranks > 1:
        request = Request(line.step, line.group, line.by_group(blocks).contiguous(), observer)
        yield request
        blocks = line.by_place(request.result)
    whole = blocks.transpose(0, 1).flatten(1, 2)
    return whole[: line.after[cut], :size].movedim((0, 1), (cut, joined))


def _slice(local: torch.Tensor, line: MeshDimStep) -> torch.Tensor:
    dim = line.step.target.dim
    size = line.before[dim]
    return local.narrow(dim, min(line.place * line.piece(size), size), line.after[dim])


def _hold(local: torch.Tensor, line: MeshDimStep) -> torch.Tensor:
    return torch.zeros_like(local) if line.step.target.op == "sum" and line.place else local


def _pad(local: torch.Tensor, line: MeshDimStep) -> torch.Tensor:
    dim, op = line.step.source.dim, line.step.target.op
    whole = local.new_full(line.after, neutral_element(op, local.dtype))
    start = min(line.place * line.piece(line.after[dim]), line.after[dim])
    whole.narrow(dim, start, line.before[dim]).copy_(local * line.ranks if op == "avg" else local)
    return whole


def _scale(local: torch.Tensor, line: MeshDimStep) -> torch.Tensor:
    return local * line.ranks if line.step.target.op == "avg" else local / line.ranks


COLLECTIVE_STEPS: dict[str, Callable[[torch.Tensor, MeshDimStep, Observer | None], RequestGenerator]] = {
    ALL_GATHER: _all_gather,
    ALL_REDUCE: _all_reduce,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
}
LOCAL_STEPS: dict[str, Callable[[torch.Tensor, MeshDimStep], torch.Tensor]] = {
    SLICE: _slice,
    HOLD: _hold,
    PAD: _pad,
    SCALE: _scale,
}


def neutral_element(op: str, dtype: torch.dtype) -> float:
    """Return a reduction's neutral element: 0 for sum and avg, the dtype's least value for max, its largest for min."""
    if op in ("sum", "avg"):
        return 0
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    if dtype == torch.bool:
        return op == "min"
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `x` with zeros appended up to `rows` rows."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _averaged(total: torch.Tensor, line: MeshDimStep) -> torch.Tensor:
    return total / line.ranks if line.step.source.op == "avg" else total
