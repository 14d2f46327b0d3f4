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

from ascend_parallel.ops.collectives import all_gather_views, reduce_scatters
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.rows import Sizes


def matmul_all_reduce(x_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks: [M, N] on every rank.

    Each chunk's rows are computed and reduced in their final place.
    """
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    with pending.launching():
        for x_c, y_c in zip(torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes), strict=True):
            torch.mm(x_c, w, out=y_c)
            pending.add(dist.all_reduce(y_c, group=group, async_op=True))
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes))
    return pending


def matmul_reduce_scatter(x_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """``[M, K] x [K, N]``, then this rank's M / R rows of the sum over ranks: [M / R, N].

    Chunk i holds, for each rank, the i-th slice of the rows which that rank will own, so that its
    reduce-scatter writes the i-th slice of the result and no row has to be moved.
    """
    ranks, (k, n) = group.size(), w.shape
    x_r_m = x_m.view(ranks, x_m.shape[0] // ranks, k)
    partial = x_m.new_empty(x_m.shape[0], n)
    y_shard_m = x_m.new_empty(x_r_m.shape[1], n)
    pending = Pending(y_shard_m, REDUCE_SCATTER, group, len(sizes))
    with pending.launching():
        scatters = reduce_scatters(y_shard_m, sizes, group)
        chunks = torch.split_with_sizes(partial, [ranks * size for size in sizes])
        for scatter, x_r_c, chunk in zip(scatters, torch.split_with_sizes(x_r_m, sizes, 1), chunks, strict=True):
            y_r_c = chunk.view(ranks, chunk.shape[0] // ranks, n)
            _multiply(x_r_c, w, y_r_c)
            pending.add(scatter.start(y_r_c))
    COUNTS.add(REDUCE_SCATTER, len(sizes), len(sizes))
    return pending


def all_gather_matmul(
    x_shard_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's ``[M / R, K]`` rows, gathered, then times ``[K, N]``: [M, N], and the gathered [M, K].

    All gathers are started at once and land in their final place. The rank's own rows need none of
    them and are computed first; then each chunk's rows of the other ranks as they arrive.
    """
    ranks, rank = group.size(), group.rank()
    gathered = x_shard_m.new_empty(ranks, *x_shard_m.shape)
    y_r_m = x_shard_m.new_empty(ranks, x_shard_m.shape[0], w.shape[1])
    chunks = torch.split_with_sizes(gathered, sizes, 1)
    pending = Pending(gathered.flatten(0, 1), ALL_GATHER, group, len(sizes))
    with pending.launching():
        for x_r_c, x_c in zip(chunks, torch.split_with_sizes(x_shard_m, sizes), strict=True):
            pending.add(all_gather_views(x_r_c, x_c, group))
        torch.mm(x_shard_m, w, out=y_r_m[rank])
        for index, (x_r_c, y_r_c) in enumerate(zip(chunks, torch.split_with_sizes(y_r_m, sizes, 1), strict=True)):
            pending.wait_for(index)
            _multiply(x_r_c, w, y_r_c, done=rank)
    COUNTS.add(ALL_GATHER, len(sizes), len(sizes))
    return y_r_m.flatten(0, 1), pending.wait()


def _multiply(x_r_c: torch.Tensor, w: torch.Tensor, y_r_c: torch.Tensor, done: int | None = None) -> None:
    """Multiply each rank's slice of rows ``[R, c, K]`` by w into ``[R, c, N]``, except that of rank `done`."""
    ranks = x_r_c.shape[0]
    if x_r_c.device.type == "cpu":
        # One call a rank: a batched matmul has no launch to save here and is slower in 16 bits.
        for rank, (x_c, y_c) in enumerate(zip(x_r_c.unbind(), y_r_c.unbind(), strict=True)):
            if rank != done:
                torch.mm(x_c, w, out=y_c)
        return
    for part in [slice(0, ranks)] if done is None else [slice(0, done), slice(done + 1, ranks)]:
        batch = x_r_c[part]
        if batch.shape[0]:
            torch.bmm(batch, w.expand(batch.shape[0], *w.shape), out=y_r_c[part])
