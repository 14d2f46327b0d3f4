"""The three operators without overlap: a whole matmul and a single collective, in turn.

A collective that comes last stays pending, as in Megatron-core, so that a weight gradient can run under it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.collectives import BY_BACKEND, all_gather_single, reduce_scatters, summed_in_backend_order
from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import ALONE, product
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.quantised import Weight, dequantised_weight
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.rows import Sizes

supports = summed_in_backend_order


def matmul_all_reduce(
    x_m: torch.Tensor,
    w: Weight,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    row_tile: int = 0,
    comm_scales: CommScales | None = None,
    addends: Sequence[torch.Tensor] = (),
) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w + addends)``: x_m [M, K], w [K, N], each addend [M, N]; pending [M, N].

    Dequantises an int8 weight whole.

    With `comm_scales` the ranks exchange int8, and the result is finished. A single rank exchanges and rounds nothing.
    """
    y_m = compute(MATMUL, "matmul", product, x_m, dequantised_weight(w, x_m.dtype), row_tile)
    for addend in addends:
        compute(BESIDE, "add", y_m.add_, addend)
    communicates = group.size() > 1 and x_m.shape[0] > 0
    if comm_scales is not None and communicates:
        y_m = _all_reduce_in_int8(y_m, comm_scales, group)
        COUNTS.add(ALL_REDUCE, 0 if isinstance(w, ALONE) else 1, 2)
        return Pending(y_m, ALL_REDUCE, group)
    pending = Pending(y_m, ALL_REDUCE, group)
    if communicates:
        pending.launch(dist.all_reduce, y_m, group=group, async_op=True)
    COUNTS.add(ALL_REDUCE, 0 if isinstance(w, ALONE) else 1, int(communicates))
    return pending


def _all_reduce_in_int8(y_m: torch.Tensor, scales: CommScales, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks of y_m [M, N], rounded as ops/comm_scales.py says; every rank sums M / R rows."""
    ranks, (m, n) = group.size(), y_m.shape
    rows = -(-m // ranks)
    sent = y_m.new_zeros(ranks * rows, n, dtype=torch.int8)  # padded with zero rows to a multiple of R
    sent[:m] = compute(BESIDE, "quantise", scales.round_partial, y_m)
    received = Pending(torch.empty_like(sent), ALL_REDUCE, group)
    received.launch(dist.all_to_all_single, received.tensor, sent, group=group, async_op=True)
    z_shard_m = compute(BESIDE, "sum", scales.round_total, received.wait().view(ranks, rows, n))
    z_m = gather_rows(z_shard_m, group, ALL_REDUCE).wait()[:m]
    y: torch.Tensor = compute(BESIDE, "dequantise", scales.dequantise, z_m)
    return y


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    order: str = BY_BACKEND,
    row_tile: int = 0,
    addends: Sequence[torch.Tensor] = (),
) -> Pending:
    """Start ``y_shard_m = reduce_scatter(x_m @ w + addends)``: x_m [M, K], w [K, N], each addend [M, N].

    Pending [M / R, N].
    """
    partial = compute(MATMUL, "matmul", product, x_m, w, row_tile, group.size())
    for addend in addends:
        compute(BESIDE, "add", partial.add_, addend)
    ranks, rows = group.size(), partial.shape[0] // group.size()
    if ranks == 1:
        return Pending(partial, REDUCE_SCATTER, group)
    pending = Pending(partial.new_empty(rows, partial.shape[1]), REDUCE_SCATTER, group)
    if rows:
        (start,) = pending.expect(reduce_scatters, pending.tensor, (rows,), group, order)
        pending.launch(start, partial)
    COUNTS.add(REDUCE_SCATTER, 0 if isinstance(w, ALONE) else 1, 1)
    return pending


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    keep_gathered: bool = True,
    row_tile: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x_m @ w`` [M, N] and ``x_m = all_gather(x_shard_m)`` [M, K]: x_shard_m [M / R, K], w [K, N]."""
    if group.size() == 1:
        return product(x_shard_m, w, row_tile), x_shard_m
    gathered = gather_rows(x_shard_m, group, ALL_GATHER).wait()
    COUNTS.add(ALL_GATHER, 0 if isinstance(w, ALONE) else 1, 1)
    return compute(MATMUL, "matmul", product, gathered, w, row_tile, group.size()), gathered


def gather_rows(x_shard_m: torch.Tensor, group: dist.ProcessGroup, operator: str) -> Pending:
    """Start ``x_m = all_gather(x_shard_m)``: x_shard_m [M / R, K]; pending [M, K], in rank order."""
    pending = Pending(x_shard_m.new_empty(group.size() * x_shard_m.shape[0], x_shard_m.shape[1]), operator, group)
    if x_shard_m.shape[0]:
        pending.launch(all_gather_single, pending.tensor, x_shard_m, group)
    return pending
