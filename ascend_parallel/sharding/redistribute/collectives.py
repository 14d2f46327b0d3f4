"""The collectives of a redistribution, on tensors with R rows (a row for each rank) or with 1 row.

    kind            x              result
    all_gather      [1, n...]      [R, n...]
    all_reduce      [1, n...]      [1, n...]
    reduce_scatter  [R, n...]      [1, n...]
    all_to_all      [R, n...]      [R, n...]

This shape allows several requests of a kind on a group to run as a single collective, with their rows side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import all_gather_single, reduce_scatters
from ascend_parallel.ops.pending import FinishingWork, NamedWork
from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from ascend_parallel.sharding.redistribute.costs import sent
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep

REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective or a message that ran: kind, mesh dimension (-1 across meshes) and the bytes that this rank sent."""

    kind: str
    mesh_dim: int
    nbytes: float


_RECORDS: ContextVar[list[CollectiveRecord] | None] = ContextVar("collective_records", default=None)


@contextmanager
def recorded() -> Iterator[list[CollectiveRecord]]:
    """Yield a list that collects the collectives of this thread's redistributions inside the context."""
    records: list[CollectiveRecord] = []
    token = _RECORDS.set(records)
    try:
        yield records
    finally:
        _RECORDS.reset(token)


def note(kind: str, mesh_dim: int, nbytes: float) -> None:
    """Add a collective to the list of `recorded`, if such a context is open."""
    records = _RECORDS.get()
    if records is not None:
        records.append(CollectiveRecord(kind, mesh_dim, nbytes))


@dataclass
class Request:
    """A collective on a group; rows are in the order of the group's ranks.

    step
        Its kind is that of the collective; the `op` of its source, a key of `REDUCTIONS`, the reduction.
    x
        The input, contiguous except for an all-reduce; not modified.
    observer
        Called with the step when the collective starts.
    result
        The output, valid after the started work was waited for.
    """

    step: RedistributeStep
    group: dist.ProcessGroup
    x: torch.Tensor
    observer: Callable[[RedistributeStep], None] | None = None
    result: torch.Tensor = field(init=False)

    @property
    def coalesce_key(self) -> Hashable:
        """Return the key that requests share if they can run as a single collective."""
        return self.step.kind, self.group, self.step.source.op, self.x.dtype, self.x.device

    def start(self) -> Work:
        """Start the collective, and return the work to wait for."""
        if self.observer is not None:
            self.observer(self.step)
        return NamedWork(self.step.kind, self._start(), self.group, self.x.device)

    def _start(self) -> Work | None:
        ranks, x, kind, op = self.group.size(), self.x, self.step.kind, self.step.source.op
        work: Work | None
        gives_all = kind in (ALL_GATHER, ALL_TO_ALL)
        note(kind, self.step.mesh_dim, sent(kind, x.nbytes * (ranks if gives_all else 1), ranks))
        if kind == ALL_REDUCE:
            self.result = x.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(self.result, REDUCTIONS[op], self.group, async_op=True)
            return work
        self.result = x.new_empty(ranks if gives_all else 1, *x.shape[1:])
        if kind == ALL_GATHER:
            return all_gather_single(self.result.view(ranks, -1), x.view(1, -1), self.group)
        if kind == ALL_TO_ALL:
            work = dist.all_to_all_single(self.result, x, group=self.group, async_op=True)
            return work
        if REDUCTIONS[op] == dist.ReduceOp.SUM:
            (start,) = reduce_scatters(self.result.view(1, -1), (1,), self.group)
            return start(x.view(ranks, -1))
        # torch's backends lack a reduce-scatter with max or min: an all-to-all, then a local reduction
        parts = torch.empty_like(x)
        extreme = torch.amax if op == "max" else torch.amin
        work = dist.all_to_all_single(parts, x, group=self.group, async_op=True)
        return FinishingWork([work], lambda: extreme(parts, 0, keepdim=True, out=self.result), self.group, parts)


class CoalescedCollective:
    """A single collective for requests with the same `coalesce_key`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        """Start the collective. Calls only the first request's observer."""
        self._requests, first = requests, requests[0]
        self._all = first
        if len(requests) > 1:
            x = torch.cat([request.x.reshape(len(request.x), -1) for request in requests], dim=1)
            self._all = Request(first.step, first.group, x, first.observer)
        self._waiting: Work | None = self._all.start()

    def wait(self) -> None:
        """Wait for the collective and set each request's result; a second call returns at once."""
        if self._waiting is None:
            return
        self._waiting.wait()
        self._waiting = None
        if len(self._requests) > 1:
            parts = torch.split(self._all.result, [request.x[0].numel() for request in self._requests], dim=1)
            for request, part in zip(self._requests, parts, strict=True):
                request.result = part.reshape(len(part), *request.x.shape[1:])
