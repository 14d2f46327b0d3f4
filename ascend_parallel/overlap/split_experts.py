"""Experts whose weights are split among ranks (expert tensor parallelism): all-gather, experts, reduce-scatter.

    received    rows of the group's experts, that this rank got by the all-to-all
    gathered    rows that every rank of the tensor-parallel group got, in rank order
    summands    outputs of all rows, of this rank's part of the weights
    summed      outputs of this rank's own rows, summed over the ranks

Backward is the same with gradients: those of the outputs are gathered, those of the rows summed. Ranks get different
numbers of rows, which neither collective of every backend takes: both are all-to-alls of as many bytes. Sums are taken
in rank order; of two ranks they have the bits of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ascend_parallel.ops.expert_exchange import ExpertGroup
from ascend_parallel.ops.pending import run_collective


@dataclass(frozen=True)
class SplitExperts:
    """The ranks that split the weights of the same experts.

    group
        Their process group: another one than that of the all-to-alls, which each of them takes part in by itself.
    received
        ``received[rank][source][expert]``: the rows that each of them gets by its all-to-all.
    sum_dtype
        In which outputs are summed over the ranks.
    """

    group: dist.ProcessGroup
    received: Sequence[Sequence[Sequence[int]]]
    sum_dtype: torch.dtype

    def gathered(self, group: ExpertGroup) -> ExpertGroup:
        """Return the group with the rows that all ranks have received: its sources are those of rank 0 first."""
        first, stop = group.experts.start, group.experts.stop
        received = tuple(tuple(counts[first:stop]) for sources in self.received for counts in sources)
        return replace(group, received=received)

    def gather(self, group: ExpertGroup, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows, and their probabilities, that all ranks have received for the experts of `group`."""
        gathered: tuple[torch.Tensor, torch.Tensor]
        gathered = _Gather.apply(self.group, self._sizes(group), rows, probs)  # type: ignore[no-untyped-call]
        return gathered

    def sum(self, group: ExpertGroup, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's own rows, from each rank's summands for all rows."""
        summed: torch.Tensor = _Sum.apply(self.group, self._sizes(group), y.to(self.sum_dtype))  # type: ignore[no-untyped-call]
        return summed.to(y.dtype)

    def _sizes(self, group: ExpertGroup) -> list[int]:
        """Return how many rows each rank has received for the experts of `group`."""
        first, stop = group.experts.start, group.experts.stop
        return [sum(sum(counts[first:stop]) for counts in sources) for sources in self.received]


class _Gather(torch.autograd.Function):
    """One function for rows and probabilities, so that every rank runs both sums of its backward, in this order."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, sizes: list[int], *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.sizes = group, sizes
        return tuple(_all_gather(x, sizes, group) for x in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        summed = (
            _reduce_scatter(dx, ctx.sizes, ctx.group) if need else None
            for dx, need in zip(gradients, needs, strict=True)
        )
        return None, None, *summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, sizes: list[int], y: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _reduce_scatter(y, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, _all_gather(dy, ctx.sizes, ctx.group)


def _all_gather(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks, `sizes` of each, in rank order."""
    out, sent = x.new_empty(sum(sizes), *x.shape[1:]), torch.cat([x] * len(sizes))
    own = [len(x)] * len(sizes)
    _all_to_all("expert_gather", out, sent, sizes, own, group)
    return out


def _reduce_scatter(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows, of the `sizes` of each rank, summed over the ranks in their order."""
    own = sizes[group.rank()]
    summands = x.new_empty(len(sizes), own, *x.shape[1:])
    _all_to_all("expert_sum", summands.flatten(0, 1), x.contiguous(), [own] * len(sizes), sizes, group)
    total, *others = summands.unbind()
    for summand in others:
        total.add_(summand)
    return total


def _all_to_all(
    name: str, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> None:
    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    run_collective(name, dist.all_to_all_single, out, x, group=group, **splits)
