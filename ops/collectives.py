"""The collectives the operators are made of, each started without waiting.

torch renamed two of them and gloo has no reduce-scatter of its own; both are dealt with here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.pending import Work
from ascend_parallel.ops.rows import Sizes

# Keeps our sends apart from others between the same two ranks of the same group.
TAG = 0xC0C

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

    def start(self, x_c: torch.Tensor) -> Work:
        """Start with the contiguous ``[R c, N]``, whose r-th c rows are what rank r receives."""
        work: Work = _reduce_scatter(self._out_c, x_c, group=self._group, async_op=True)
        return work


class ExchangeAndSum:
    """A reduce-scatter for gloo: every rank sends each other one its slice and sums what it receives.

    gloo's own is a full all-reduce of a copy, twice the traffic or more. Receives are posted when the
    object is made: gloo announces them through the stream that carries the data, so a late one waits
    behind megabytes of the other direction and the two directions run in turn. The sum is taken in
    rank order, in fp32 for 16-bit types, so every run gives the same bits.
    """

    def __init__(self, out_c: torch.Tensor, received: dict[int, torch.Tensor], group: dist.ProcessGroup) -> None:
        """Post the receives of every other rank's slice into the ``[c, N]`` of `received`, by rank."""
        self._out_c = out_c
        self._group = group
        self._parts = received
        self._works = [dist.irecv(part, group=group, group_src=peer, tag=TAG) for peer, part in received.items()]

    def start(self, x_c: torch.Tensor) -> Work:
        """Send the other ranks their c rows of the contiguous ``[R c, N]``."""
        ranks = len(self._parts) + 1
        for rank, part in enumerate(torch.split_with_sizes(x_c, [x_c.shape[0] // ranks] * ranks)):
            if rank in self._parts:
                self._works.append(dist.isend(part, group=self._group, group_dst=rank, tag=TAG))
            else:
                own = {rank: part}
        self._parts |= own
        return self

    def wait(self) -> None:
        """Wait for the exchange, then sum."""
        for work in self._works:
            assert work is not None
            work.wait()
        first, *rest = [self._parts[rank] for rank in range(len(self._parts))]
        wide = len(rest) > 1 and self._out_c.element_size() == 2
        total = first.float() if wide else torch.add(first, rest.pop(0), out=self._out_c)
        for part in rest:
            total.add_(part)
        if wide:
            self._out_c.copy_(total)


def reduce_scatters(
    out_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup
) -> Sequence[ReduceScatter | ExchangeAndSum]:
    """Make one reduce-scatter ready for each chunk of rows of the contiguous ``[M / R, N]``."""
    outs = torch.split_with_sizes(out_m, sizes)
    if dist.get_backend(group) != dist.Backend.GLOO:
        return [ReduceScatter(out_c, group) for out_c in outs]
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    received = [torch.split_with_sizes(torch.empty_like(out_m), sizes) for _ in peers]
    return [
        ExchangeAndSum(out_c, dict(zip(peers, parts, strict=True)), group)
        for out_c, parts in zip(outs, zip(*received, strict=True), strict=True)
    ]
