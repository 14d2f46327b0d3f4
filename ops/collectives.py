"""The asynchronous collectives of the operators.

This module hides what differs between backends (process_groups/backend.py): gloo has no reduce-scatter of its own, and
rows that are gathered in chunks reach their places by sends, by one exchange of lists, or through a buffer. torch 2.13
renamed two collectives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.arithmetic import DEPENDS_ON_DEGREE
from ascend_parallel.ops.blocks import summed_dtype
from ascend_parallel.ops.call import ALL_GATHER, Matmul
from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.pending import FinishingWork
from ascend_parallel.ops.record import BESIDE, compute, recorded_as
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.process_groups.backend import ALL_TO_ALL, CHUNK_MAJOR, SENDS, backend_of, usual_backend

# Calls on each group so far; every rank counts alike. The number is part of the message tag, so that messages match
# neither a program's own sends nor receives left over from a failed call.
# Gathers and scatters are counted apart: what one rank alone does may have it start a gather before a scatter, and
# others after it.
_GATHERS: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_SCATTERS: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
FIRST_TAG, TAGS = 1 << 24, 1 << 24

# Renamed in torch 2.13, where the old names warn.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Who decides in which order ranks are summed: the backend; the ranks' order, a left fold; or one binary tree, in fp32
# for 16 bits, whose upper levels these are (ops/blocks.py has the lower ones).
BY_BACKEND, BY_RANK, IN_TREE = "backend", "rank", "tree"

SumParts = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
StartGather = Callable[[], Work]
"""Starts ``rows_c = all_gather(x_c)``: x_c [c, K], this rank's rows, which are there; rows_c [R, c, K] of all ranks."""
StartScatter = Callable[[torch.Tensor], Work]
"""Starts ``out_c = reduce_scatter(x_c)``: contiguous x_c [R c, N]; out_c [c, N] gets rank r's, the r-th, c rows."""


def all_gather_single(out_m: torch.Tensor, x_shard_m: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start ``out_m = all_gather(x_shard_m)``: x_shard_m [M / R, K], contiguous out_m [M, K], in rank order."""
    work: Work = _all_gather(out_m, x_shard_m.contiguous(), group=group, async_op=True)
    return work


class Gathers(NamedTuple):
    """All-gathers of chunks of rows that are to be started.

    gathered
        [R, M / R, K]: the rows of all ranks, in their places once the chunks are waited for; None if nobody keeps them.
    rows
        For each chunk the rows [c, K] of each rank, once it is waited for; in place, of this rank those that it sends.
    starts
        For each chunk the function that starts its gather.
    in_place
        Whether `rows` are those of `gathered` without this rank's own, which the caller has.
    """

    gathered: torch.Tensor | None
    rows: Sequence[Sequence[torch.Tensor] | torch.Tensor]
    starts: Sequence[StartGather]
    in_place: bool


def all_gathers(x_shard_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, keep: bool) -> Gathers:
    """Return the all-gathers of chunks of x_shard_m [M / R, K], by which no backend copies a chunk to its places.

    On gloo, posts the receives of all chunks: see `_send_and_sum`. Only a gather through a buffer needs memory
    beside the gathered rows: as much again, if these are kept.
    """
    (m, k), ranks, rank = x_shard_m.shape, group.size(), group.rank()
    backend = backend_of(group, x_shard_m.device)
    way = backend.gathers
    if len(sizes) == 1 and way != SENDS:
        whole = x_shard_m.new_empty(ranks, m, k)
        start = functools.partial(all_gather_single, whole.flatten(0, 1), x_shard_m, group)
        return Gathers(whole, [whole], [start], in_place=False)
    chunks = torch.split_with_sizes(x_shard_m, sizes)
    if way == CHUNK_MAJOR:
        buffers = torch.split_with_sizes(x_shard_m.new_empty(ranks * m, k), [ranks * size for size in sizes])
        kept = x_shard_m.new_empty(ranks, m, k) if keep else None
        places = [None] * len(sizes) if kept is None else torch.split_with_sizes(kept, sizes, 1)
        ways = zip(buffers, places, chunks, strict=True)
        through = [functools.partial(_gather_and_place, buffer, place, group, x_c) for buffer, place, x_c in ways]
        return Gathers(kept, [buffer.view(ranks, -1, k) for buffer in buffers], through, in_place=False)
    gathered = x_shard_m.new_empty(ranks, m, k)
    of_ranks = gathered.unbind()
    parts = [chunks if peer == rank else torch.split_with_sizes(of_ranks[peer], sizes) for peer in range(ranks)]
    rows = list(zip(*parts, strict=True))
    starts: list[StartGather] = []
    if way == ALL_TO_ALL:
        nothing = x_shard_m[:0]
        starts = [functools.partial(_exchange_rows, rows_c, nothing, rank, group) for rows_c in rows]
    else:
        tag, peers = gather_tag(group), [*range(rank), *range(rank + 1, ranks)]
        for rows_c in rows:
            works: list[Any] = []
            for peer in peers:
                works.append(dist.irecv(rows_c[peer], group=group, group_src=peer, tag=tag))
            starts.append(functools.partial(_send, works, peers, group, tag, rows_c[rank]))
    return Gathers(gathered, rows, starts, in_place=True)


def _send(works: list[Any], peers: Sequence[int], group: dist.ProcessGroup, tag: int, x_c: torch.Tensor) -> Work:
    """Send this rank's chunk to each peer on gloo; `works` are the receives of the chunk, which have been posted."""
    x_c = x_c.contiguous()
    for peer in peers:
        works.append(dist.isend(x_c, group=group, group_dst=peer, tag=tag))
    return FinishingWork(works, None, group, x_c)


def _exchange_rows(rows_c: Sequence[torch.Tensor], nothing: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Work:
    """Gather a chunk by one exchange of lists; a rank exchanges `nothing` with itself, so that nothing is copied."""
    places, sent = list(rows_c), [rows_c[rank].contiguous()] * len(rows_c)
    places[rank] = sent[rank] = nothing
    work: Work = dist.all_to_all(places, sent, group=group, async_op=True)
    return work


def _gather_and_place(
    buffer: torch.Tensor, place: torch.Tensor | None, group: dist.ProcessGroup, x_c: torch.Tensor
) -> Work:
    """Gather a chunk into a buffer [R c, K]; `wait` copies it to its place [R, c, K], unless that is None."""
    work = all_gather_single(buffer, x_c, group)
    if place is None:
        return work
    return FinishingWork([work], functools.partial(place.copy_, buffer.view_as(place)), group, buffer)


def gather_tag(group: dist.ProcessGroup) -> int:
    """Return the tag of the messages of the next gather on a group."""
    return FIRST_TAG + next(_GATHERS.setdefault(group, itertools.count())) % TAGS


def scatter_tag(group: dist.ProcessGroup) -> int:
    """Return the tag of the messages of the next reduce-scatter on a group."""
    return FIRST_TAG + TAGS + next(_SCATTERS.setdefault(group, itertools.count())) % TAGS


def collective_of_tag(tag: int) -> str | None:
    """Return "all_gather" or "reduce_scatter", of which a message with this tag on gloo is a part; None: of neither."""
    names = ("all_gather", "reduce_scatter")
    return names[(tag - FIRST_TAG) // TAGS] if FIRST_TAG <= tag < FIRST_TAG + len(names) * TAGS else None


def reduce_scatter_single(out_c: torch.Tensor, group: dist.ProcessGroup, x_c: torch.Tensor) -> Work:
    """Start the backend's own ``out_c = reduce_scatter(x_c)``: contiguous x_c [R c, N], out_c [c, N]."""
    work: Work = _reduce_scatter(out_c, x_c, group=group, async_op=True)
    return work


class FollowedWork:
    """A started work, and another that `advance` starts when the first is done; `wait` waits for both."""

    def __init__(self, first: Work, follow: Callable[[], Work]) -> None:
        """Hold the first work; `follow` starts the second."""
        self._first, self._follow = first, follow
        self._second: Work | None = None

    def is_completed(self) -> bool:
        """Tell whether the second work is done."""
        return self._second is not None and self._second.is_completed()

    def advance(self) -> None:
        """Wait for the first work, and start the second; a second call does nothing."""
        if self._second is None:
            self._first.wait()
            self._second = self._follow()

    def wait(self) -> None:
        """Wait for both works."""
        self.advance()
        assert self._second is not None
        self._second.wait()


def _all_to_all_and_sum(sum_parts: SumParts, out_c: torch.Tensor, group: dist.ProcessGroup, x_c: torch.Tensor) -> Work:
    """Start a reduce-scatter in an order of ours, where the backend has another: all-to-all, then a local sum."""
    received = torch.empty_like(x_c)
    work = dist.all_to_all_single(received, x_c, group=group, async_op=True)
    parts = received.view(group.size(), *out_c.shape).unbind()
    return FinishingWork([work], functools.partial(sum_parts, parts, out_c), group, out_c)


def _send_and_sum(
    sum_parts: SumParts,
    out_c: torch.Tensor,
    received: Mapping[int, torch.Tensor],
    works: list[Any],
    group: dist.ProcessGroup,
    tag: int,
    x_c: torch.Tensor,
) -> Work:
    """Run a chunk's reduce-scatter on gloo: every rank sends each peer its slice, and sums the slices.

    gloo's own reduce-scatter is a full all-reduce of a copy: twice the traffic or more. Receives are posted before
    the matmuls: gloo announces a receive through the stream that carries the data, so a late receive waits behind
    megabytes of the other direction, and the two directions run in turn. `sum_parts` has an order of its own, so every
    run gives the same bits.

    received, works
        The buffers [c, N] by peer rank, and their receives, which have been posted.
    """
    parts = list(torch.split_with_sizes(x_c, [out_c.shape[0]] * group.size()))
    for peer, part in received.items():
        works.append(dist.isend(parts[peer], group=group, group_dst=peer, tag=tag))
        parts[peer] = part
    return FinishingWork(works, functools.partial(sum_parts, parts, out_c), group, out_c)


def _sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write ``parts[0] + parts[1] + ...`` to `out` [c, N]: in rank order, in fp32 for 16-bit types."""
    first, second, *rest = parts
    wide = bool(rest) and out.element_size() == 2  # a sum of two parts is rounded only once
    total = first.float().add_(second) if wide else torch.add(first, second, out=out)
    for part in rest:
        total.add_(part)
    if wide:
        out.copy_(total)


def _sum_in_tree(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write ``(parts[0] + parts[1]) + (parts[2] + parts[3]) + ...`` to `out`, level by level, and round once.

    The parts, a power of two of them, have the dtype of the sums, and are changed.
    """
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    out.copy_(parts[0])


# The sums as they are recorded.
sum_in_rank_order: SumParts = functools.partial(compute, BESIDE, "sum", _sum_in_rank_order)  # type: ignore[call-arg]
sum_in_tree: SumParts = functools.partial(compute, BESIDE, "sum", _sum_in_tree)  # type: ignore[call-arg]
_SUMS: dict[str, SumParts] = {BY_BACKEND: _sum_in_rank_order, BY_RANK: _sum_in_rank_order, IN_TREE: _sum_in_tree}


def reduce_scatters(
    out_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, order: str = BY_BACKEND
) -> Sequence[StartScatter]:
    """Return, for each chunk of rows of the contiguous out_m [M / R, ...], the function that starts its reduce-scatter.

    Where the backend has no reduce-scatter of its own, posts the receives of all chunks. gloo's own order is that of
    the ranks. For sums in a tree of 16-bit results the functions take fp32.
    """
    outs, sum_parts = torch.split_with_sizes(out_m, sizes), recorded_as(BESIDE, "sum", _SUMS[order])
    backend = backend_of(group, out_m.device)
    if backend.own_scatter:
        start = reduce_scatter_single if order == BY_BACKEND else functools.partial(_all_to_all_and_sum, sum_parts)
        return [functools.partial(start, out_c, group) for out_c in outs]
    tag = scatter_tag(group)
    peers = [*range(group.rank()), *range(group.rank() + 1, group.size())]
    dtype = summed_dtype(out_m.dtype) if order == IN_TREE else out_m.dtype
    received = [torch.split_with_sizes(torch.empty_like(out_m, dtype=dtype), sizes) for _ in peers]
    starts: list[StartScatter] = []
    for out_c, parts in zip(outs, zip(*received, strict=True), strict=True):
        by_peer, works = dict(zip(peers, parts, strict=True)), list[Any]()
        for peer, part in by_peer.items():
            works.append(dist.irecv(part, group=group, group_src=peer, tag=tag))
        starts.append(functools.partial(_send_and_sum, sum_parts, out_c, by_peer, works, group, tag))
    return starts


def summed_in_backend_order(matmul: Matmul) -> str | None:
    """Return a refusal if the matmul needs sums in rank order and the backend chooses the order; else None."""
    if refusal := matmul.arithmetic.forbids(DEPENDS_ON_DEGREE):
        return refusal
    one_order = matmul.ranks == 2 and usual_backend(matmul.device).adds_pairs
    if not matmul.deterministic or matmul.operator == ALL_GATHER or one_order:
        return None
    return f"the backend decides in which order it sums {matmul.ranks} {matmul.device} ranks"
