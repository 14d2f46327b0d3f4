"""The three operators in chunks of rows, so that matmul and collective overlap.

All-reduce and reduce-scatter follow the matmul: chunk i's collective runs under chunk i + 1's matmul.
All-gather comes before the matmul: chunk i's matmul runs under chunk i + 1's collective, and the rank's own
rows are multiplied first.

Memory beyond the serial path: none, where the backend reduces in place. Chunks are views of tensors that the
serial path allocates too. On gloo, matmul_reduce_scatter also holds receive buffers of (R - 1) / R of its
partial result; gloo's own reduce-scatter copies the whole partial result.

Each tensor is split once, before the loop: slicing inside the loop costs several times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from ascend_parallel.ops.blocks import summed_dtype
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.chunk_loop import ChunkLoop, chunk_loop
from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import (
    BY_BACKEND,
    BY_RANK,
    IN_TREE,
    Gathers,
    all_gathers,
    gather_tag,
    reduce_scatters,
    scatter_tag,
    summed_in_backend_order,
)
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import (
    ALONE,
    BlockedWeight,
    Blocks,
    batches,
    chunk_products,
    cut_blocks,
)
from ascend_parallel.ops.pending import FinishingWork, Pending
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.record import BESIDE, MATMUL, Steps, compute, recorded_steps
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import arriving, is_unfinished
from ascend_parallel.process_groups.backend import SENDS, Backend, backend_of

supports = summed_in_backend_order

EachRows = Callable[[int, slice, torch.Tensor], object]
"""``each(rank, rows, x [m, K])`` is called with the rows `rows` of a rank's M / R once they are gathered."""


def matmul_all_reduce(
    x_m: torch.Tensor,
    w: Weight | BlockedWeight,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    row_tile: int = 0,
    addends: Sequence[torch.Tensor] = (),
) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w + addends)``: x_m [M, K], w [K, N], each addend [M, N]; pending [M, N].

    Each chunk's rows are computed and reduced in place. An int8 weight is cut into chunks of columns instead; it has no
    addends.
    """
    if isinstance(w, QuantisedWeight):
        return _int8_all_reduce(x_m, w, group, sizes)
    x_m, up_to = arriving(x_m)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes), sizes)
    if up_to is None and not addends and (loop := chunk_loop(group, x_m, w)) is not None:
        backend = backend_of(group, x_m.device)
        pending.launch_loop(loop, backend, loop.all_reduce, x_m, w, y_m, sizes, row_tile)
        COUNTS.add(ALL_REDUCE, len(sizes), len(sizes))
        return pending
    rows, places = torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes)
    blocks = zip(zip(rows), zip(places), strict=True)  # each chunk is one block
    steps = recorded_steps(MATMUL, "matmul", chunk_products(blocks, w, row_tile))
    if up_to is not None or addends:
        steps = _computing(steps, places, sizes, up_to, addends)
    starts = [functools.partial(dist.all_reduce, y_c, group=group, async_op=True) for y_c in places]
    pending.launch_each(starts, steps)
    COUNTS.add(ALL_REDUCE, 0 if isinstance(w, ALONE) else len(sizes), len(sizes))
    return pending


def _int8_all_reduce(x_m: torch.Tensor, w: QuantisedWeight, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w)`` as `matmul_all_reduce` does, in chunks of columns: `sizes` are columns.

    Chunk i's collective runs under chunk i + 1's dequantisation and matmul. Chunks of columns have three advantages
    over chunks of rows: each column is dequantised once, only one chunk of the weight is held dequantised at a time,
    and a single row (a decoding step) can be cut.

    Memory beyond the serial path: a chunk of columns is not contiguous in a result of several rows. It is therefore
    reduced in a buffer, which `wait` copies into the result. A result of one row is reduced in place.
    """
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    stop = 0
    with pending.launching():
        for y_c in torch.split_with_sizes(y_m, sizes, 1):
            start, stop = stop, stop + y_c.shape[1]
            w_c = compute(BESIDE, "dequantise", w.dequantise, x_m.dtype, start, stop)
            y_part = y_c if x_m.shape[0] == 1 else y_c.new_empty(y_c.shape)
            compute(MATMUL, "matmul", torch.mm, x_m, w_c, out=y_part)
            del w_c  # freed before the next chunk is dequantised
            if y_part is y_c:
                pending.launch(dist.all_reduce, y_c, group=group, async_op=True)
            elif x_m.shape[0]:
                pending.launch(reduce_and_place, y_part, y_c, group)
    COUNTS.add(ALL_REDUCE, 0 if isinstance(w, ALONE) else len(sizes), len(sizes) if x_m.shape[0] else 0)
    return pending


def reduce_and_place(y_part: torch.Tensor, y_c: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start the all-reduce of the contiguous buffer y_part [M, c]; `wait` copies it into y_c, a view of the result."""
    work = dist.all_reduce(y_part, group=group, async_op=True)
    return FinishingWork([work], functools.partial(y_c.copy_, y_part), group, y_c)


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor | BlockedWeight,
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

    Chunk i holds the i-th slice of every rank's M / R rows, so its reduce-scatter writes the i-th slice of the
    result in place.

    Nothing is sent before `after` is done, where a backend runs collectives concurrently: these would slow `after`
    down. `order` is that of the sum over ranks (ops/collectives.py).
    """
    ranks, (k, n) = group.size(), w.shape
    x_m, up_to = arriving(x_m, ranks)
    rows = x_m.shape[0] // ranks
    partial = x_m.new_empty(x_m.shape[0], n, dtype=summed_dtype(x_m.dtype) if order == IN_TREE else x_m.dtype)
    y_shard_m = x_m.new_empty(rows, n)
    pending = Pending(y_shard_m, REDUCE_SCATTER, group, len(sizes), sizes)
    backend = backend_of(group, x_m.device)
    if not backend.concurrent or backend.gathers == SENDS:  # in order anyway: a connection carries sends in turn
        after = None
    batched = backend.launches and not row_tile
    plain = up_to is None and after is None and not addends and order != IN_TREE
    if plain and (loop := chunk_loop(group, x_m, w)) is not None:
        own, tag = backend.own_scatter, 0 if backend.own_scatter else scatter_tag(group)
        by_rank = order == BY_RANK
        pending.launch_loop(
            loop, backend, loop.reduce_scatter, x_m, w, partial, y_shard_m, sizes, row_tile, own, by_rank, batched, tag
        )
        COUNTS.add(REDUCE_SCATTER, len(sizes), len(sizes))
        return pending
    if batched and isinstance(w, torch.Tensor):
        w = w.expand(ranks, k, n)
    starts = pending.expect(reduce_scatters, y_shard_m, sizes, group, order)
    outputs = torch.split_with_sizes(partial, _cuts(sizes, ranks).chunks)
    blocks = _batches(x_m.view(ranks, rows, k), outputs, sizes) if batched else _rank_blocks(x_m, partial, sizes, ranks)
    steps = recorded_steps(MATMUL, "matmul", chunk_products(blocks, w, row_tile))
    if up_to is not None or addends:
        steps = _computing(steps, outputs, sizes, up_to, addends, ranks)
    of_outputs = [functools.partial(start, y_c) for start, y_c in zip(starts, outputs, strict=True)]
    if after is None:
        pending.launch_each(of_outputs, steps)
    else:
        _launch_behind(after, pending, of_outputs, steps)
    COUNTS.add(REDUCE_SCATTER, 0 if isinstance(w, ALONE) else len(sizes), len(sizes))
    return pending


class _Cuts(NamedTuple):
    """The rows of each chunk of all ranks, and of each rank in each chunk, in the order of the chunks."""

    chunks: Sizes
    pieces: Sizes


@functools.lru_cache(maxsize=4096)
def _cuts(sizes: Sizes, ranks: int) -> _Cuts:
    return _Cuts(tuple(ranks * size for size in sizes), tuple(size for size in sizes for _ in range(ranks)))


def _rank_blocks(x_m: torch.Tensor, partial: torch.Tensor, sizes: Sizes, ranks: int) -> Blocks:
    """Return each rank's block of each chunk: x_m [M, K] has rank after rank, `partial` [M, N] chunk after chunk."""
    count, places = len(sizes), torch.split_with_sizes(partial, _cuts(sizes, ranks).pieces)
    blocks = torch.split_with_sizes(x_m, sizes * ranks)
    return [(blocks[index::count], places[ranks * index : ranks * (index + 1)]) for index in range(count)]


def _batches(x_r_m: torch.Tensor, outputs: Sequence[torch.Tensor], sizes: Sizes) -> Blocks:
    """Return one batch [R, c, K] of x_r_m [R, M / R, K] for each chunk, whose product is the chunk [R c, N]."""
    ranks = x_r_m.shape[0]
    chunks = zip(torch.split_with_sizes(x_r_m, sizes, 1), outputs, sizes, strict=True)
    return [((x_c,), (y_c.view(ranks, size, y_c.shape[1]),)) for x_c, y_c, size in chunks]


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w: torch.Tensor | BlockedWeight,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    keep_gathered: bool = True,
    row_tile: int = 0,
    each: EachRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``x_m @ w`` [M, N] and ``x_m = all_gather(x_shard_m)`` [M, K]: x_shard_m [M / R, K], w [K, N].

    All gathers start at once. The rank's own rows are multiplied first, since they need no gather; then the other
    ranks' rows, chunk by chunk, as they arrive. `each` is called after each of these matmuls. Without keep_gathered
    the second result is None: this rank's own rows are then not copied.

    Of an unfinished x_shard_m a chunk is sent, and its own rows are multiplied, as soon as the chunk is there.
    """
    ranks, rank, in_chunks = group.size(), group.rank(), is_unfinished(x_shard_m) and not row_tile
    x_shard_m = x_shard_m.contiguous()
    own_m, up_to = arriving(x_shard_m)
    backend = backend_of(group, own_m.device)
    batched = backend.launches and not row_tile and ranks > 2
    y_r_m = x_shard_m.new_empty(ranks, x_shard_m.shape[0], w.shape[1])
    if up_to is None and each is None and (loop := chunk_loop(group, own_m, w)) is not None:
        gathering = _gather_in_loop(
            loop, backend, own_m, group, sizes, ALL_GATHER, keep_gathered, w, y_r_m, row_tile, batched
        )
        COUNTS.add(ALL_GATHER, len(sizes), len(sizes))
        with gathering.launching():
            gathered = gathering.wait()
        return y_r_m.flatten(0, 1), gathered if keep_gathered else None
    y_parts = y_r_m.unbind()
    own_blocks: Blocks = [((own_m,), (y_parts[rank],))]
    if in_chunks:
        own_blocks = zip(cut_blocks([own_m], sizes), cut_blocks([y_parts[rank]], sizes), strict=True)
    own = recorded_steps(MATMUL, "own rows", chunk_products(own_blocks, w, row_tile))
    if each is not None:
        own_sizes = sizes if in_chunks else (own_m.shape[0],)
        own = _followed(own, each, own_sizes, {rank: torch.split_with_sizes(own_m, own_sizes)})

    behind = own if in_chunks else [*[()] * (len(sizes) - 1), *own]
    gathering, gathers = _start_gathers(x_shard_m, group, sizes, ALL_GATHER, behind, keep=keep_gathered)
    COUNTS.add(ALL_GATHER, 0 if isinstance(w, ALONE) else len(sizes), len(sizes))
    with gathering.launching():
        outputs = cut_blocks(batches(y_r_m, rank) if batched else [*y_parts[:rank], *y_parts[rank + 1 :]], sizes)
        blocks = zip(_peer_blocks(gathers, sizes, rank, batched), outputs, strict=True)
        products = recorded_steps(MATMUL, "matmul", chunk_products(blocks, w, row_tile))
        if each is not None:
            others = (*range(rank), *range(rank + 1, ranks))
            arrived = {other: [rows[other] for rows in gathers.rows] for other in others}
            products = _followed(products, each, sizes, arrived)
    gathered = gathering.wait_each(products)
    return y_r_m.flatten(0, 1), gathered if keep_gathered else None


def _gather_in_loop(
    loop: ChunkLoop,
    backend: Backend,
    x_shard_m: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    operator: str,
    keep: bool,
    w: torch.Tensor | BlockedWeight | None = None,
    y_r_m: torch.Tensor | None = None,
    row_tile: int = 0,
    batched: bool = False,
) -> Pending:
    """Start all-gathers as `start_gathers` does, and given w the products of `all_gather_matmul`, by a loop in C++."""
    pending, way = Pending(x_shard_m, operator, group, len(sizes)), backend.gathers
    tag = gather_tag(group) if way == SENDS else 0
    gathered: torch.Tensor | None = pending.launch_loop(
        loop, backend, loop.all_gather, x_shard_m, sizes, way, tag, keep, w, y_r_m, row_tile, batched
    )
    if gathered is not None:
        pending.tensor = gathered.flatten(0, 1)
    return pending


def _peer_blocks(gathers: Gathers, sizes: Sizes, rank: int, batched: bool) -> Iterable[Sequence[torch.Tensor]]:
    """Return the peers' rows of each chunk as `rank_blocks` does."""
    if batched and gathers.in_place:
        assert gathers.gathered is not None
        return cut_blocks(batches(gathers.gathered, rank), sizes)
    if batched:
        return [batches(rows, rank) for rows in gathers.rows if isinstance(rows, torch.Tensor)]
    return [[*rows[:rank], *rows[rank + 1 :]] for rows in gathers.rows]


def _followed(
    products: Sequence[Steps], each: EachRows, sizes: Sizes, rows: Mapping[int, Sequence[torch.Tensor]]
) -> Sequence[Steps]:
    """Return the products of chunks of these sizes, each with a call of `each` for the rows of every rank behind it."""
    found: list[Steps] = []
    for index, (steps, (start, stop)) in enumerate(zip(products, pairwise(accumulate(sizes, initial=0)), strict=True)):
        calls = [functools.partial(each, rank, slice(start, stop), chunks[index]) for rank, chunks in rows.items()]
        found.append((*steps, *calls))
    return found


def start_gathers(x_shard_m: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, operator: str) -> Pending:
    """Start all-gathers of the chunks of x_shard_m [M / R, K]; return pending [M, K]."""
    own_m, up_to = arriving(x_shard_m)
    if up_to is None and (loop := chunk_loop(group, own_m)) is not None:
        return _gather_in_loop(loop, backend_of(group, own_m.device), own_m, group, sizes, operator, True)
    return _start_gathers(x_shard_m, group, sizes, operator)[0]


def _start_gathers(
    x_shard_m: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    operator: str,
    behind: Sequence[Steps] = (),
    *,
    keep: bool = True,
) -> tuple[Pending, Gathers]:
    """Start all-gathers of the chunks of x_shard_m [M / R, K]; return pending [M, K], and where the chunks come.

    With keep=False the pending tensor is not to be read. behind: the steps that run after the start of each chunk.
    """
    x_shard_m, up_to = arriving(x_shard_m)
    pending = Pending(x_shard_m, operator, group, len(sizes))
    gathers = pending.expect(all_gathers, x_shard_m, sizes, group, keep)
    if gathers.gathered is not None:
        pending.tensor = gathers.gathered.flatten(0, 1)
    arrivals = [] if up_to is None else [(functools.partial(up_to, stop),) for stop in accumulate(sizes)]
    pending.launch_each(gathers.starts, arrivals, behind)
    if keep and gathers.in_place and gathers.gathered is not None:
        with pending.launching():
            compute(BESIDE, "own rows", gathers.gathered[group.rank()].copy_, x_shard_m)
    return pending, gathers


def _computing(
    products: Sequence[Steps],
    places: Sequence[torch.Tensor],
    sizes: Sizes,
    up_to: Callable[[int], object] | None,
    addends: Sequence[torch.Tensor],
    ranks: int = 1,
) -> Sequence[Steps]:
    """Return the steps of each chunk: its rows come, `up_to` a stop, are multiplied, and the addends [M, N] are added.

    places: the products [R c, N] of the chunks, which have as many rows c of each of the ranks.
    """
    found: list[Steps] = []
    for stop, size, product, y_c in zip(accumulate(sizes), sizes, products, places, strict=True):
        arrival = () if up_to is None else (functools.partial(up_to, stop),)
        y_r_c = y_c.view(ranks, size, y_c.shape[1])
        added: list[Callable[[], object]] = []
        for addend in addends:
            rows_c = addend.view(ranks, sum(sizes), addend.shape[1])[:, stop - size : stop]
            added.append(functools.partial(compute, BESIDE, "add", y_r_c.add_, rows_c))
        found.append((*arrival, *product, *added))
    return found


def _launch_behind(
    after: Pending, pending: Pending, starts: Iterable[Callable[[], Work]], steps: Sequence[Steps]
) -> None:
    """Compute the chunks, and start the collective of each once it is computed and `after` is done."""
    computed: list[Callable[[], Work]] = []
    with pending.launching():
        for start, steps_c in zip(starts, steps, strict=True):
            for step in steps_c:
                step()
            computed.append(start)
            if after.done():
                pending.launch_each(computed)
                computed.clear()
        if computed:
            after.wait()
            pending.launch_each(computed)
