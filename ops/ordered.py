"""The reducing operators with every sum over ranks taken in rank order: deterministic on any backend.

A backend's own all-reduce sums in an order that depends on the place in the buffer, so with more than
two ranks its bits depend on how the rows were cut. Here partial results travel and each rank adds
them itself, in rank order and, for 16-bit types, in fp32: with matmuls in row tiles the bits are the same
in every run, for every number of chunks, on every rank.

The price of an all-reduce done so: (R - 1) times the result is received by every rank, where a ring
moves 2 (R - 1) / R times; and two chunks of R partial results are held beside the result.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_parallel.ops import chunked, reference
from ascend_parallel.ops.chunked import all_gather_matmul
from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import sum_in_rank_order, wait_all
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import multiply
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, Problem
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.record import MATMUL, Watch, compute
from ascend_parallel.ops.rows import Sizes

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "supports"]


def supports(problem: Problem) -> str | None:
    """Say why there is nothing to order, or None."""
    return "a gather sums nothing" if problem.operator == ALL_GATHER else None


def matmul_all_reduce(
    x_m: torch.Tensor, w: Weight, group: dist.ProcessGroup, sizes: Sizes, *, row_tile: int = 0
) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks in rank order: [M, N] on every rank.

    Chunk i's partial results are gathered under chunk i + 1's matmul. An int8 weight is dequantised whole.
    """
    if isinstance(w, QuantisedWeight):  # chunks of its columns could change the matmul's bits
        w, sizes = w.dequantise(x_m.dtype), (x_m.shape[0],)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    with pending.launching():
        chunks = zip(torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes), strict=True)
        for index, (x_c, y_c) in enumerate(chunks):
            compute(MATMUL, "matmul", multiply, x_c, w, y_c, row_tile)
            if y_c.shape[0]:
                pending.launch(GatherAndSum, y_c, group)
            if index:
                pending.wait_for(index - 1)
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes))
    return pending


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    row_tile: int = 0,
) -> Pending:
    """``[M, K] x [K, N]``, then this rank's M / R rows of the sum in rank order: [M / R, N]."""
    run = chunked.matmul_reduce_scatter if len(sizes) > 1 else reference.matmul_reduce_scatter
    return run(x_m, w, group, sizes, after, in_rank_order=True, row_tile=row_tile)


class GatherAndSum:
    """An all-reduce: every rank's ``[c, N]`` is gathered, and `wait` sums them in place, in rank order."""

    def __init__(self, y_c: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start gathering."""
        self._y_c = y_c
        self._parts = y_c.new_empty(group.size(), *y_c.shape).unbind()
        self._works: list[Work | None] = [dist.all_gather(list(self._parts), y_c, group=group, async_op=True)]

    def watched(self, watch: Watch) -> None:
        """Have somebody watch when the partial results are there."""
        self._works = watch(self._works)

    def is_completed(self) -> bool:
        """Say whether the sum was taken, which `wait` does."""
        return not self._parts

    def wait(self) -> None:
        """Wait for the partial results and sum them; the second call does nothing."""
        if self._parts:
            wait_all(self._works)
            sum_in_rank_order(self._parts, self._y_c)
            self._parts = ()
