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

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ascend_parallel.ops import columns
from ascend_parallel.ops.collectives import Scatter, reduce_scatters, summed_in_backend_order
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.rows import Sizes


def supports(problem: Problem) -> str | None:
    """Say why the kernel must not run `problem`, or None."""
    return summed_in_backend_order(problem)


def matmul_all_reduce(x_m: torch.Tensor, w: Weight, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks: [M, N] on every rank.

    Each chunk's rows are computed and reduced in their final place. An int8 weight is cut by columns instead.
    """
    if isinstance(w, QuantisedWeight):
        return columns.matmul_all_reduce(x_m, w, group, sizes)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    with pending.launching():
        for x_c, y_c in zip(torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes), strict=True):
            compute(MATMUL, "matmul", torch.mm, x_c, w, out=y_c)
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
        inputs = _chunks(_blocks(x_m.view(ranks, rows, k)), sizes)
        outputs = torch.split_with_sizes(partial, [ranks * size for size in sizes])
        for scatter, x_blocks, y_c, size in zip(scatters, inputs, outputs, sizes, strict=True):
            compute(MATMUL, "matmul", _multiply, x_blocks, w, _blocks(y_c.view(ranks, size, n)))
            computed.append((scatter, y_c))
            if after is None or after.done():
                _start(computed, pending)
        if computed and after is not None:
            after.wait()
            _start(computed, pending)
    COUNTS.add(REDUCE_SCATTER, len(sizes), len(sizes))
    return pending


def all_gather_matmul(
    x_shard_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, *, keep_gathered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's ``[M / R, K]`` rows, gathered, then times ``[K, N]``: [M, N], and the gathered [M, K].

    All gathers are started at once and land in their final place. The rank's own rows need none of
    them and are computed first; then each chunk's rows of the other ranks as they arrive.
    """
    ranks, rank = group.size(), group.rank()
    y_r_m = x_shard_m.new_empty(ranks, x_shard_m.shape[0], w.shape[1])
    gathering, gathered = start_gathers(x_shard_m, group, sizes, ALL_GATHER)
    with gathering.launching():
        compute(MATMUL, "own rows", torch.mm, x_shard_m, w, out=y_r_m[rank])
        inputs = _chunks(_blocks(gathered, but=rank), sizes)
        outputs = _chunks(_blocks(y_r_m, but=rank), sizes)
        for index, (x_blocks, y_blocks) in enumerate(zip(inputs, outputs, strict=True)):
            gathering.wait_for(index)
            compute(MATMUL, "matmul", _multiply, x_blocks, w, y_blocks)
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
        outputs = _chunks(gathered.unbind(), sizes)
        for x_c, places in zip(torch.split_with_sizes(x_shard_m, sizes), outputs, strict=True):
            pending.launch(dist.all_gather, list(places), x_c.contiguous(), group=group, async_op=True)
    return pending, gathered


def _start(computed: list[tuple[Scatter, torch.Tensor]], pending: Pending) -> None:
    """Start the reduce-scatters of the chunks computed so far, and forget them."""
    for scatter, y_c in computed:
        pending.launch(scatter.start, y_c)
    computed.clear()


def _blocks(x_r_m: torch.Tensor, but: int | None = None) -> Sequence[torch.Tensor]:
    """Rows of the ranks ``[R, m, K]``, without those of rank `but`, as the device multiplies them best."""
    return (_by_rank if x_r_m.device.type == "cpu" else _batched)(x_r_m, but)


def _by_rank(x_r_m: torch.Tensor, but: int | None) -> Sequence[torch.Tensor]:
    """Each rank's ``[m, K]``: on a CPU there is no launch to save, and batches in 16 bits are slower."""
    return [x_m for rank, x_m in enumerate(x_r_m.unbind()) if rank != but]


def _batched(x_r_m: torch.Tensor, but: int | None) -> Sequence[torch.Tensor]:
    """Strided batches ``[r, m, K]``, one launch each."""
    batches = [x_r_m] if but is None else [x_r_m[:but], x_r_m[but + 1 :]]
    return [batch for batch in batches if batch.shape[0]]


def _chunks(blocks: Sequence[torch.Tensor], sizes: Sizes) -> Iterable[tuple[torch.Tensor, ...]]:
    """Cut the rows of every block ``[..., m, K]``: item i holds the i-th chunk of each."""
    return zip(*(torch.split_with_sizes(block, sizes, -2) for block in blocks), strict=True)


def _multiply(x_blocks: Sequence[torch.Tensor], w: torch.Tensor, y_blocks: Sequence[torch.Tensor]) -> None:
    """Multiply blocks of rows by w ``[K, N]`` into their places."""
    for x_block, y_block in zip(x_blocks, y_blocks, strict=True):
        if x_block.dim() == 2:
            torch.mm(x_block, w, out=y_block)
        else:
            torch.bmm(x_block, w.expand(x_block.shape[0], *w.shape), out=y_block)
