"""The three operators cut into chunks of rows, so that matmul and collective share their time.

Two schedules: where the collective follows the matmul (all-reduce, reduce-scatter), chunk i's
collective runs under chunk i + 1's matmul; where it comes first (all-gather), chunk i's matmul runs
under chunk i + 1's collective, and the rows that the rank already has go before all others.

Memory beyond the serial path: none, where the backend reduces in place. Chunks are views of tensors
that the serial path has too. On gloo a rank also holds what it receives for its own rows, (R - 1) / R
of matmul_reduce_scatter's partial result, where gloo's own reduce-scatter copies the whole of it.

Views are made by cutting a tensor once: a slice in the loop costs several times as much.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_parallel.ops import columns
from ascend_parallel.ops.collectives import Scatter, reduce_scatters, summed_in_backend_order
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import cut_blocks, multiply, multiply_blocks, rank_blocks
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.rows import Sizes


def supports(problem: Problem) -> str | None:
    """Say why the kernel must not run `problem`, or None."""
    return summed_in_backend_order(problem)


def matmul_all_reduce(
    x_m: torch.Tensor, w: Weight, group: dist.ProcessGroup, sizes: Sizes, *, row_tile: int = 0
) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks: [M, N] on every rank.

    Each chunk's rows are computed and reduced in their final place. An int8 weight is cut by columns instead.
    """
    if isinstance(w, QuantisedWeight):
        return columns.matmul_all_reduce(x_m, w, group, sizes)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    with pending.launching():
        for x_c, y_c in zip(torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes), strict=True):
            compute(MATMUL, "matmul", multiply, x_c, w, y_c, row_tile)
            pending.launch(dist.all_reduce, y_c, group=group, async_op=True)
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes))
    return pending


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    in_rank_order: bool = False,
    row_tile: int = 0,
) -> Pending:
    """``[M, K] x [K, N]``, then this rank's M / R rows of the sum over ranks: [M / R, N].

    Chunk i holds, for each rank, the i-th slice of the rows which that rank will own, so that its
    reduce-scatter writes the i-th slice of the result and no row has to be moved.

    With `after`, nothing is sent before that is done: for a backend that runs collectives at the same
    time, where these would slow it down. `in_rank_order` has the ranks summed in their order on any backend.
    """
    ranks, (k, n) = group.size(), w.shape
    rows = x_m.shape[0] // ranks
    partial = x_m.new_empty(x_m.shape[0], n)
    y_shard_m = x_m.new_empty(rows, n)
    pending = Pending(y_shard_m, REDUCE_SCATTER, group, len(sizes))
    computed: list[tuple[Scatter, torch.Tensor]] = []
    with pending.launching():
        scatters = reduce_scatters(y_shard_m, sizes, group, in_rank_order)
        pending.expect(scatters)
        inputs = cut_blocks(rank_blocks(x_m.view(ranks, rows, k), row_tile), sizes)
        outputs = torch.split_with_sizes(partial, [ranks * size for size in sizes])
        for scatter, x_blocks, y_c, size in zip(scatters, inputs, outputs, sizes, strict=True):
            y_blocks = rank_blocks(y_c.view(ranks, size, n), row_tile)
            compute(MATMUL, "matmul", multiply_blocks, x_blocks, w, y_blocks, row_tile)
            computed.append((scatter, y_c))
            if after is None or after.done():
                _start(computed, pending)
        if computed and after is not None:
            after.wait()
            _start(computed, pending)
    COUNTS.add(REDUCE_SCATTER, len(sizes), len(sizes))
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
    """Every rank's ``[M / R, K]`` rows, gathered, then times ``[K, N]``: [M, N], and the gathered [M, K].

    All gathers are started at once and land in their final place. The rank's own rows need none of
    them and are computed first; then each chunk's rows of the other ranks as they arrive.
    """
    ranks, rank, x_shard_m = group.size(), group.rank(), x_shard_m.contiguous()
    y_r_m = x_shard_m.new_empty(ranks, x_shard_m.shape[0], w.shape[1])
    gathering, gathered = start_gathers(x_shard_m, group, sizes, ALL_GATHER)
    with gathering.launching():
        compute(MATMUL, "own rows", multiply, x_shard_m, w, y_r_m[rank], row_tile)
        inputs = cut_blocks(rank_blocks(gathered, row_tile, but=rank), sizes)
        outputs = cut_blocks(rank_blocks(y_r_m, row_tile, but=rank), sizes)
        for index, (x_blocks, y_blocks) in enumerate(zip(inputs, outputs, strict=True)):
            gathering.wait_for(index)
            compute(MATMUL, "matmul", multiply_blocks, x_blocks, w, y_blocks, row_tile)
    COUNTS.add(ALL_GATHER, len(sizes), len(sizes))
    return y_r_m.flatten(0, 1), gathering.wait()


def gather_rows(x_shard_m: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """Every rank's ``[M / R, K]`` rows, in rank order, left pending: [M, K].

    Several pieces in flight keep both directions of a link busy, where one alone may not.
    """
    return start_gathers(x_shard_m, group, sizes, "all_gather")[0]


def start_gathers(
    x_shard_m: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, operator: str
) -> tuple[Pending, torch.Tensor]:
    """Start gathering chunks of ``[M / R, K]`` into their places: pending [M, K], and the same as [R, M / R, K]."""
    gathered = x_shard_m.new_empty(group.size(), *x_shard_m.shape)
    pending = Pending(gathered.flatten(0, 1), operator, group, len(sizes))
    with pending.launching():
        outputs = cut_blocks(gathered.unbind(), sizes)
        for x_c, places in zip(torch.split_with_sizes(x_shard_m, sizes), outputs, strict=True):
            pending.launch(dist.all_gather, list(places), x_c.contiguous(), group=group, async_op=True)
    return pending, gathered


def _start(computed: list[tuple[Scatter, torch.Tensor]], pending: Pending) -> None:
    """Start the reduce-scatters of the chunks computed so far, and forget them."""
    for scatter, y_c in computed:
        pending.launch(scatter.start, y_c)
    computed.clear()
