"""The collectives the operators are made of, each started without waiting.

torch renamed two of them and gloo has no reduce-scatter of its own; both are dealt with here.
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

# Calls on each group so far; every rank counts alike. Their number is in the tag of what they send, so
# that it meets neither a program's own sends nor receives left over from a call that failed.
_CALLS: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
FIRST_TAG = 1 << 24

# Renamed in torch 2.13, where the old names warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_single(out_m: torch.Tensor, x_shard_m: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start gathering ``[M / R, K]`` of every rank into the contiguous ``[M, K]``, in rank order."""
    work: Work = _all_gather(out_m, x_shard_m.contiguous(), group=group, async_op=True)
    return work


class ReduceScatter:
    """One reduce-scatter of ``[R c, N]`` into ``[c, N]``, made ready before its input is computed."""

    def __init__(self, out_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Write the sum over ranks of each rank's slice for this rank to `out_c`."""
        self._out_c = out_c
        self._group = group

    def expect(self) -> None:
        """Do nothing: the backend has no use for it."""

    def start(self, x_c: torch.Tensor) -> Work:
        """Start with the contiguous ``[R c, N]``, whose r-th c rows are what rank r receives."""
        work: Work = _reduce_scatter(self._out_c, x_c, group=self._group, async_op=True)
        return work


class ExchangeAndSum:
    """A reduce-scatter for gloo: every rank sends each other one its slice and sums what it receives.

    gloo's own is a full all-reduce of a copy, twice the traffic or more. Receives are posted before
    anything is computed: gloo announces them through the stream that carries the data, so a late one waits
    behind megabytes of the other direction and the two directions run in turn. The sum is taken in
    rank order, in fp32 for 16-bit types, so every run gives the same bits.
    """

    def __init__(
        self, out_c: torch.Tensor, received: dict[int, torch.Tensor], group: dist.ProcessGroup, tag: int
    ) -> None:
        """Write the sum to `out_c` [c, N]; other ranks' slices go to the ``[c, N]`` of `received`, by rank."""
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
        """Send the other ranks their c rows of the contiguous ``[R c, N]``."""
        ranks = len(self._parts) + 1
        for rank, part in enumerate(torch.split_with_sizes(x_c, [x_c.shape[0] // ranks] * ranks)):
            if rank in self._parts:
                self._works.append(dist.isend(part, group=self._group, group_dst=rank, tag=self._tag))
            else:
                own = {rank: part}
        self._parts |= own
        return self

    def watched(self, watch: Watch) -> None:
        """Have somebody watch when the exchange is done."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Say no: the sum is taken in `wait`."""
        return False

    def wait(self) -> None:
        """Wait for the exchange, then sum."""
        wait_all(self._works)
        sum_in_rank_order([self._parts[rank] for rank in range(len(self._parts))], self._out_c)


class AllToAllAndSum:
    """A reduce-scatter in rank order for backends whose own has another order: all-to-all, then the sum."""

    def __init__(self, out_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Write the sum over ranks of each rank's slice for this rank to `out_c` [c, N]."""
        self._out_c = out_c
        self._group = group
        self._works: list[Work | None] = []

    def expect(self) -> None:
        """Do nothing: the backend has no use for it."""

    def start(self, x_c: torch.Tensor) -> Work:
        """Send the other ranks their c rows of the contiguous ``[R c, N]``."""
        self._received = torch.empty_like(x_c)
        self._works = [dist.all_to_all_single(self._received, x_c, group=self._group, async_op=True)]
        return self

    def watched(self, watch: Watch) -> None:
        """Have somebody watch when the exchange is done."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Say no: the sum is taken in `wait`."""
        return False

    def wait(self) -> None:
        """Wait for the exchange, then sum."""
        wait_all(self._works)
        sum_in_rank_order(self._received.view(self._group.size(), *self._out_c.shape).unbind(), self._out_c)


def wait_all(works: Sequence[Work | None]) -> None:
    """Wait for each."""
    for work in works:
        assert work is not None, "this rank is not a member of the group"
        work.wait()


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of every rank's ``[c, N]``, in rank order and, for 16-bit types, in fp32, to `out` [c, N]."""
    compute(BESIDE, "sum", _sum_in_rank_order, parts, out)


def _sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    first, second, *rest = parts
    wide = bool(rest) and out.element_size() == 2  # two parts are rounded once anyway
    total = first.float().add_(second) if wide else torch.add(first, second, out=out)
    for part in rest:
        total.add_(part)
    if wide:
        out.copy_(total)


Scatter = ReduceScatter | ExchangeAndSum | AllToAllAndSum


def reduce_scatters(
    out_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, in_rank_order: bool = False
) -> Sequence[Scatter]:
    """Make one reduce-scatter for each chunk of rows of the contiguous ``[M / R, N]``; `expect`, then `start` each.

    On gloo all sums are taken in rank order, elsewhere those that are asked to be.
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
    """Say that the backend decides in which order ranks are summed where the problem asks for rank order, or None."""
    if not problem.deterministic or problem.operator == ALL_GATHER or (problem.ranks == 2 and problem.device == "cpu"):
        return None
    return f"the backend decides in which order it sums {problem.ranks} {problem.device} ranks"


def on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the group's collectives on `device` run on gloo, which runs several at the same time."""
    name: str = group._get_backend(device).name()
    return name == "gloo"
