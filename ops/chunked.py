"""The three operators cut into chunks of rows, so that matmul and collective share their time.

Two schedules: where the collective follows the matmul (all-reduce, reduce-scatter), chunk i's
collective runs under chunk i + 1's matmul; where it comes first (all-gather), chunk i's matmul runs
under chunk i + 1's collective, and the rows that the rank already has go before all others.

Memory beyond the serial path: none, where the backend reduces in place. Chunks are views of tensors
that the serial path has too, and those of matmul_reduce_scatter together are its partial result. On
gloo a rank also holds what it receives for its own rows, (R - 1) / R of that partial result, where
gloo's own reduce-scatter copies the whole of it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_parallel.ops.collectives import all_gather_views, reduce_scatter_into
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.rows import Bounds


def matmul_all_reduce(x_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, bounds: Bounds) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks: [M, N] on every rank.

    Each chunk's rows are computed and reduced in their final place.
    """
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(bounds))
    with pending.launching():
        for start, stop in bounds:
            chunk = y_m[start:stop]
            torch.mm(x_m[start:stop], w, out=chunk)
            pending.add(dist.all_reduce(chunk, group=group, async_op=True))
    COUNTS.add(ALL_REDUCE, len(bounds), len(bounds))
    return pending


def matmul_reduce_scatter(x_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, bounds: Bounds) -> Pending:
    """``[M, K] x [K, N]``, then this rank's M / R rows of the sum over ranks: [M / R, N].

    Chunk i holds, for each rank, the i-th slice of the rows which that rank will own, so that its
    reduce-scatter writes the i-th slice of the result and no row has to be moved.
    """
    ranks = group.size()
    x_r_m = x_m.view(ranks, x_m.shape[0] // ranks, x_m.shape[1])
    y_shard_m = x_m.new_empty(x_r_m.shape[1], w.shape[1])
    pending = Pending(y_shard_m, REDUCE_SCATTER, group, len(bounds))
    with pending.launching():
        scatters = [reduce_scatter_into(y_shard_m[start:stop], group) for start, stop in bounds]
        for (start, stop), scatter in zip(bounds, scatters, strict=True):
            chunk = x_m.new_empty(ranks, stop - start, w.shape[1])
            _matmul_slices(x_r_m[:, start:stop], w, chunk)
            pending.add(scatter.start(chunk))
    COUNTS.add(REDUCE_SCATTER, len(bounds), len(bounds))
    return pending


def all_gather_matmul(
    x_shard_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, bounds: Bounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's ``[M / R, K]`` rows, gathered, then times ``[K, N]``: [M, N], and the gathered [M, K].

    All gathers are started at once and land in their final place. The rank's own rows need none of
    them and are computed first; then each chunk's rows of the other ranks as they arrive.
    """
    ranks, rank = group.size(), group.rank()
    gathered = x_shard_m.new_empty(ranks, *x_shard_m.shape)
    y_r_m = x_shard_m.new_empty(ranks, x_shard_m.shape[0], w.shape[1])
    pending = Pending(gathered.flatten(0, 1), ALL_GATHER, group, len(bounds))
    with pending.launching():
        for start, stop in bounds:
            pending.add(all_gather_views(gathered[:, start:stop], x_shard_m[start:stop], group))
        torch.mm(x_shard_m, w, out=y_r_m[rank])
        for index, (start, stop) in enumerate(bounds):
            pending.wait_for(index)
            for others in (slice(0, rank), slice(rank + 1, ranks)):
                _matmul_slices(gathered[others, start:stop], w, y_r_m[others, start:stop])
    COUNTS.add(ALL_GATHER, len(bounds), len(bounds))
    return y_r_m.flatten(0, 1), pending.wait()


def _matmul_slices(x_r_c: torch.Tensor, w: torch.Tensor, y_r_c: torch.Tensor) -> None:
    """Multiply each rank's slice of rows ``[R, c, K]`` by w into ``[R, c, N]``, both strided views."""
    if x_r_c.device.type == "cpu":
        # One call a rank: a batched matmul has no launch to save here and is slower in 16 bits.
        for x_c, y_c in zip(x_r_c.unbind(), y_r_c.unbind(), strict=True):
            torch.mm(x_c, w, out=y_c)
    elif x_r_c.shape[0]:
        torch.bmm(x_r_c, w.expand(x_r_c.shape[0], *w.shape), out=y_r_c)
