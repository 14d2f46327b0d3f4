"""The sum over ranks behind a vocabulary-parallel embedding, whose rows come while the first layer computes.

Each rank looks up the tokens of its own part of the vocabulary; the rows of other tokens are zero. So sums are exact.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Matmul
from ascend_parallel.ops.chunked import reduce_and_place, start_gathers
from ascend_parallel.ops.collectives import reduce_scatters
from ascend_parallel.ops.decision import Decision, because
from ascend_parallel.ops.host_lead import LEADS
from ascend_parallel.ops.operators import in_timeline, rows_of, shaped
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.ops.unfinished import unfinished
from ascend_parallel.overlap.known import region_chunks
from ascend_parallel.overlap.layer import ParallelLinear, in_forward, layer_backward

COUNTED = "region embedding"


def embedding_sizes(batch: int, tokens: int, layer: ParallelLinear, *, shared_later: bool = False) -> Sizes | None:
    """Return the tokens of each chunk of every sequence, or of a rank's share of it where ranks share its rows.

    shared_later: ranks share the rows of the sum once all of them have it. None: the rows are too few to leave any
    unfinished, or a fused kernel, which reads whole tensors, comes next. Every rank decides alike.
    """
    shares, settings = layer.group.size() if layer.sequence_parallel or shared_later else 1, layer.settings
    if not layer.leaves_rows or settings.fused or settings.effective_mode != 2 or tokens % shares:
        return None
    tile = settings.chunk_rows // gcd(settings.chunk_rows, batch)  # so that cuts of rows are at multiples of chunk_rows
    sizes = split_rows(tokens // shares, region_chunks(settings), tile)
    return sizes if len(sizes) > 1 and batch * sum(sizes) >= layer.leaves_rows * len(sizes) else None


def sum_embedded(y: torch.Tensor, sizes: Sizes, vocabulary: int, layer: ParallelLinear) -> torch.Tensor:
    """Return the sum over ranks of y [b, s, H]; with sequence parallelism this rank's rows of the sum of y [s, b, H].

    y           what this rank has looked up, contiguous, which belongs to this call
    sizes       of `embedding_sizes`
    vocabulary  the number of tokens of this rank, for timelines

    The rows are unfinished, where tensors may be.
    """
    summed: torch.Tensor = _Summed.apply(y, sizes, vocabulary, layer)  # type: ignore[no-untyped-call]
    return summed


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, sizes: Sizes, vocabulary: int, layer: ParallelLinear) -> torch.Tensor:
        ctx.layer, ctx.batch, ctx.sizes = layer, y.shape[1], sizes
        start, operator = (_start_scatters, REDUCE_SCATTER) if layer.sequence_parallel else (_start_sums, ALL_REDUCE)
        layer.about_to_communicate()
        with in_forward(ctx, "embedding", y), _recorded(operator, y, sizes, vocabulary, layer.group):
            return start(y, sizes, layer.group)

    @staticmethod
    @layer_backward("embedding")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Return dy, with sequence parallelism gathered chunk by chunk, as its rows come."""
        if not ctx.layer.sequence_parallel:
            return dy, None, None, None
        rows = tuple(ctx.batch * size for size in ctx.sizes)
        with _recorded(ALL_GATHER, dy, ctx.sizes, 0, ctx.layer.group):
            gathering = start_gathers(rows_of(dy), ctx.layer.group, rows, ALL_GATHER)
            return gathering.wait().view(-1, ctx.batch, dy.shape[-1]), None, None, None


def _start_sums(y: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup) -> torch.Tensor:
    """Start an all-reduce for the same tokens of every sequence, and share of it; return [b, s, H].

    The first layer reads its rows [s, b, H] in this order. Tokens of several sequences are not contiguous: they are
    reduced in a copy.
    """
    blocks, hidden = y.shape[:2].numel() // sum(sizes), y.shape[2]
    value = y.detach() if blocks == 1 else y.new_empty(y.shape)
    pending = Pending(value.view(-1, hidden), ALL_REDUCE, group, len(sizes), sizes)
    parts, places = (torch.split_with_sizes(each.view(blocks, -1, hidden), sizes, 1) for each in (y, value))
    with pending.launching():
        for part, place in zip(parts, places, strict=True):
            if blocks == 1:
                pending.launch(dist.all_reduce, place, group=group, async_op=True)
            else:
                pending.launch(reduce_and_place, part.contiguous(), place, group)
    return shaped(_left(pending, blocks), y.shape)


def _start_scatters(y: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup) -> torch.Tensor:
    """Start a reduce-scatter for each chunk of every rank's rows; return [s / R, b, H]."""
    (tokens, batch, hidden), ranks = y.shape, group.size()
    rows = tuple(batch * size for size in sizes)
    y_shard = y.new_empty(batch * tokens // ranks, hidden)
    pending = Pending(y_shard, REDUCE_SCATTER, group, len(sizes), rows)
    with pending.launching():
        starts = pending.expect(reduce_scatters, y_shard, rows, group)
        parts = torch.split_with_sizes(y.view(ranks, -1, batch, hidden), sizes, 1)
        for start, part in zip(starts, parts, strict=True):
            pending.launch(start, part.reshape(-1, hidden))
    return shaped(_left(pending), (tokens // ranks, batch, hidden))


def _left(pending: Pending, blocks: int = 1) -> torch.Tensor:
    """Return the rows of started collectives, unfinished where the host runs ahead."""
    ahead = LEADS.host_is_ahead(pending.group, pending.tensor.device)
    return unfinished(pending, 1, COUNTED, blocks) if ahead else pending.wait()


def _recorded(
    operator: str, y: torch.Tensor, sizes: Sizes, vocabulary: int, group: dist.ProcessGroup
) -> AbstractContextManager[object]:
    """Return a context that records the call in a timeline: as the product of rows that choose tokens, and a weight."""
    matmul = Matmul(operator, y.shape[:-1].numel(), vocabulary, y.shape[-1], y.dtype, y.device.type, group.size())
    return in_timeline(Decision(matmul, "chunked", sizes, None, (because("embedding"),)), group)
