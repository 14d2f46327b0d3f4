"""matmul_all_reduce and matmul_reduce_scatter with sums in rank order: deterministic on any backend.

A backend's all-reduce sums in an order that depends on the position in the buffer, so with more than two ranks its
bits depend on the chunks. This kernel sends partial results, and each rank adds them in rank order, in fp32 for 16-bit
types. With matmuls in row tiles the bits are the same in every run, for every number of chunks, on every rank.

Cost of the all-reduce: every rank receives (R - 1) times the result, where a ring moves 2 (R - 1) / R times, and
holds two chunks of R partial results beside the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ascend_parallel.ops import chunked, reference
from ascend_parallel.ops.arithmetic import DEPENDS_ON_DEGREE
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, Matmul
from ascend_parallel.ops.chunked import all_gather_matmul
from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import BY_RANK, all_gather_single, sum_in_rank_order
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import ALONE, multiply
from ascend_parallel.ops.pending import FinishingWork, Pending
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.rows import Sizes

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "supports"]


def supports(matmul: Matmul) -> str | None:
    """Return the reason why the kernel cannot run `matmul`, or None if it can."""
    nothing = "a gather sums nothing" if matmul.operator == ALL_GATHER else None
    return matmul.arithmetic.forbids(DEPENDS_ON_DEGREE) or nothing


def matmul_all_reduce(
    x_m: torch.Tensor, w: Weight, group: dist.ProcessGroup, sizes: Sizes, *, row_tile: int = 0
) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w)``, summed in rank order: x_m [M, K], w [K, N]; pending [M, N].

    Chunk i's partial results are gathered under chunk i + 1's matmul. An int8 weight is dequantised whole.
    """
    if isinstance(w, QuantisedWeight):  # chunks of columns could change the matmul's bits
        w, sizes = w.dequantise(x_m.dtype), (x_m.shape[0],)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    with pending.launching():
        chunks = zip(torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes), strict=True)
        for index, (x_c, y_c) in enumerate(chunks):
            compute(MATMUL, "matmul", multiply, x_c, w, y_c, row_tile)
            if y_c.shape[0]:
                pending.launch(_gather_and_sum, y_c, group)
            if index:
                pending.wait_for(index - 1)
    COUNTS.add(ALL_REDUCE, 0 if isinstance(w, ALONE) else len(sizes), len(sizes))
    return pending


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    row_tile: int = 0,
    addends: Sequence[torch.Tensor] = (),
) -> Pending:
    """Start ``y_shard_m = reduce_scatter(x_m @ w + addends)``, summed in rank order; shapes as in `chunked`."""
    run = chunked.matmul_reduce_scatter if len(sizes) > 1 else reference.matmul_reduce_scatter
    return run(x_m, w, group, sizes, after, order=BY_RANK, row_tile=row_tile, addends=addends)


def _gather_and_sum(y_c: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start an all-reduce of y_c [c, N]: all ranks gather the parts, and `wait` sums them into y_c, in rank order."""
    parts = y_c.new_empty(group.size(), *y_c.shape)
    work = all_gather_single(parts.flatten(0, 1), y_c, group)
    return FinishingWork([work], functools.partial(sum_in_rank_order, parts.unbind(), y_c), group, y_c)
