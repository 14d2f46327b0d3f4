"""The asynchronous collectives of the operators.

This module hides two differences: torch 2.13 renamed two collectives, and gloo has no native reduce-scatter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.problem import ALL_GATHER, Problem
from ascend_parallel.ops.record import BESIDE, Watch, compute
from ascend_parallel.ops.rows import Sizes

# Calls on each group so far; every rank counts alike. The number is part of the message tag, so that messages match
# neither a program's own sends nor receives left over from a failed call.
_CALLS: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
FIRST_TAG = 1 << 24

# Renamed in torch 2.13, where the old names warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_single(out_m: torch.Tensor, x_shard_m: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start ``out_m = all_gather(x_shard_m)``: x_shard_m [M / R, K], contiguous out_m [M, K], in rank order."""
    work: Work = _all_gather(out_m, x_shard_m.contiguous(), group=group, async_op=True)
    return work


class ReduceScatter:
    """``out_c = reduce_scatter(x_c)``: x_c [R c, N], out_c [c, N]; constructed before x_c is computed."""

    def __init__(self, out_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Hold the output `out_c`."""
        self._out_c = out_c
        self._group = group

    def expect(self) -> None:
        """Do nothing: the backend posts no receives in advance."""

    def start(self, x_c: torch.Tensor) -> Work:
        """Start with the contiguous x_c [R c, N]; rank r receives the r-th block of c rows."""
        work: Work = _reduce_scatter(self._out_c, x_c, group=self._group, async_op=True)
        return work


class ExchangeAndSum:
    """A reduce-scatter for gloo: every rank sends each peer its slice and sums the slices it receives.

    gloo's own reduce-scatter is a full all-reduce of a copy: twice the traffic or more. Receives are posted before
    the matmuls: gloo announces a receive through the stream that carries the data, so a late receive waits behind
    megabytes of the other direction, and the two directions run in turn. The sum runs in rank order, in fp32
    for 16-bit types, so every run gives the same bits.
    """

    def __init__(
        self, out_c: torch.Tensor, received: dict[int, torch.Tensor], group: dist.ProcessGroup, tag: int
    ) -> None:
        """Hold the output `out_c` [c, N] and the receive buffers [c, N], by peer rank."""
        self._out_c = out_c
        self._group = group
        self._parts = received
        self._tag = tag
        self._works: list[Work | None] = []

    def expect(self) -> Work:
        """Post the receives."""
        for peer, part in self._parts.items():
            self._works.append(dist.irecv(part, group=self._group, group_src=peer, tag=self._tag))
        return self

    def start(self, x_c: torch.Tensor) -> Work:
        """Send each peer its c rows of the contiguous x_c [R c, N]."""
        ranks = len(self._parts) + 1
        for rank, part in enumerate(torch.split_with_sizes(x_c, [x_c.shape[0] // ranks] * ranks)):
            if rank in self._parts:
                self._works.append(dist.isend(part, group=self._group, group_dst=rank, tag=self._tag))
            else:
                own = {rank: part}
        self._parts |= own
        return self

    def record_end(self, watch: Watch) -> None:
        """Have `watch` record when the exchange is done."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Return False: `wait` still has to sum."""
        return False

    def wait(self) -> None:
        """Wait for the exchange, then sum."""
        wait_all(self._works)
        sum_in_rank_order([self._parts[rank] for rank in range(len(self._parts))], self._out_c)


class AllToAllAndSum:
    """A reduce-scatter in rank order, for backends that sum in another order: all-to-all, then a local sum."""

    def __init__(self, out_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Hold the output `out_c` [c, N]."""
        self._out_c = out_c
        self._group = group
        self._works: list[Work | None] = []

    def expect(self) -> None:
        """Do nothing: the backend posts no receives in advance."""

    def start(self, x_c: torch.Tensor) -> Work:
        """Send each peer its c rows of the contiguous x_c [R c, N]."""
        self._received = torch.empty_like(x_c)
        self._works = [dist.all_to_all_single(self._received, x_c, group=self._group, async_op=True)]
        return self

    def record_end(self, watch: Watch) -> None:
        """Have `watch` record when the exchange is done."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Return False: `wait` still has to sum."""
        return False

    def wait(self) -> None:
        """Wait for the exchange, then sum."""
        wait_all(self._works)
        sum_in_rank_order(self._received.view(self._group.size(), *self._out_c.shape).unbind(), self._out_c)


def wait_all(works: Sequence[Work | None]) -> None:
    """Wait for every work."""
    for work in works:
        assert work is not None, "this rank is not a member of the group"
        work.wait()


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write ``parts[0] + parts[1] + ...`` to `out` [c, N]: in rank order, in fp32 for 16-bit types."""
    compute(BESIDE, "sum", _sum_in_rank_order, parts, out)


def _sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    first, second, *rest = parts
    wide = bool(rest) and out.element_size() == 2  # a sum of two parts is rounded only once
    total = first.float().add_(second) if wide else torch.add(first, second, out=out)
    for part in rest:
        total.add_(part)
    if wide:
        out.copy_(total)


Scatter = ReduceScatter | ExchangeAndSum | AllToAllAndSum


def reduce_scatters(
    out_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, in_rank_order: bool = False
) -> Sequence[Scatter]:
    """Return a reduce-scatter for each chunk of rows of the contiguous out_m [M / R, N]; call `expect`, then `start`.

    gloo always sums in rank order, other backends with `in_rank_order`.
    """
    outs = torch.split_with_sizes(out_m, sizes)
    if not on_gloo(group, out_m.device):
        kind = AllToAllAndSum if in_rank_order else ReduceScatter
        return [kind(out_c, group) for out_c in outs]
    tag = FIRST_TAG + next(_CALLS.setdefault(group, itertools.count())) % FIRST_TAG
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    received = [torch.split_with_sizes(torch.empty_like(out_m), sizes) for _ in peers]
    return [
        ExchangeAndSum(out_c, dict(zip(peers, parts, strict=True)), group, tag)
        for out_c, parts in zip(outs, zip(*received, strict=True), strict=True)
    ]


def summed_in_backend_order(problem: Problem) -> str | None:
    """Return a refusal if the problem needs sums in rank order and the backend chooses the order; else None."""
    if not problem.deterministic or problem.operator == ALL_GATHER or (problem.ranks == 2 and problem.device == "cpu"):
        return None
    return f"the backend decides in which order it sums {problem.ranks} {problem.device} ranks"


def on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the group's backend on `device` is gloo, which runs several collectives at the same time."""
    name: str = group._get_backend(device).name()
    return name == "gloo"
