"""Causal attention whose rows do not know each other, for COC_DETERMINISTIC=invariant: one order of sums everywhere.

A query has the same bits in a batch of any size, in a prefill of any length, in decoding, and on any number of ranks:

scores    products of tiles (row_tiles.py), in fp32; the largest of a row is exact in any order
weights   ``exp(score - largest)``; keys that a query does not see have weight 0
output    products of `KEYS` keys each, from the first key of the sequence on, summed in one binary tree, as the weights
          are; a block of unseen keys adds zero, so later keys change nothing

A trainer has keys side by side, a server in pages: both hand over blocks of keys. Grouped queries share their keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.row_tiles import SMALLER, multiply_batches

KEYS = 64
# Queries of a head that are multiplied at once, where there are as many; fewer are filled up to one of `FEWER`.
QUERIES = 128
FEWER = (*reversed(SMALLER), 16, 32, 64, 128)
# Scores that are held at once, of all heads: about what a cache holds.
SCORES = 1 << 19


class Sequence(NamedTuple):
    """Queries ``[first, first + queries)`` of a sequence; they are the last of its keys ``[start, start + length)``."""

    first: int
    queries: int
    start: int
    length: int


Sequences = tuple[Sequence, ...]


def key_spans(seen: torch.Tensor) -> torch.Tensor:
    """Return the first and the last key that each query sees, [B, n, 2], of a mask seen [B, n, m]; no keys: (0, -1).

    Raises `DegreeError` for keys that are not side by side.
    """
    places = torch.arange(seen.shape[-1], device=seen.device)
    last = torch.where(seen, places, -1).amax(-1)
    first = torch.where(seen, places, seen.shape[-1]).amin(-1).masked_fill(last < 0, 0)
    if not torch.equal(seen.sum(-1), last - first + 1):
        raise DegreeError("attention: a mask leaves out keys between those that a query sees")
    return torch.stack([first, last], -1)


def sequences_of(spans: torch.Tensor | None, batch: int, queries: int, length: int) -> Sequences:
    """Return the sequences of a batch of so many queries and `length` keys each, side by side.

    spans: as `key_spans` returns them; None: each row of the batch is one sequence.
    """
    if spans is None:
        return tuple(Sequence(row * queries, queries, row * length, length) for row in range(batch))
    found: list[Sequence] = []
    for row, seen in enumerate(spans.tolist()):
        first = 0
        for at in range(1, queries + 1):
            if at < queries and _goes_on(seen[at - 1], seen[at]):
                continue
            start, last = seen[at - 1]
            if last >= 0:
                found.append(Sequence(row * queries + first, at - first, row * length + start, last + 1 - start))
            first = at
    return tuple(found)


def _goes_on(before: list[int], after: list[int]) -> bool:
    """Tell whether a query sees one key more than the query before it, of the same sequence; or both none."""
    return after[0] == before[0] and (after[1] == before[1] + 1 or before[1] == after[1] == -1)


class KeyBlocks(NamedTuple):
    """Keys and values [G, m, D] of a sequence, in fp32; m is a multiple of `KEYS`, with zeros at the end."""

    keys: torch.Tensor
    values: torch.Tensor


def key_blocks(keys: torch.Tensor, values: torch.Tensor) -> KeyBlocks:
    """Return the blocks of keys and values [m, G, D]."""
    return KeyBlocks(_blocks(keys), _blocks(values))


def _blocks(x: torch.Tensor) -> torch.Tensor:
    m, heads, width = x.shape
    blocks = x.new_zeros(heads, m + -m % KEYS, width, dtype=torch.float32)
    blocks[:, :m] = x.transpose(0, 1)
    return blocks


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float) -> torch.Tensor:
    """Return the attention [T, H, D] of q [T, H, D] over k and v [M, G, D]; H is a multiple of G.

    Queries of no sequence have zeros. Sequences share no queries, and no keys.
    """
    out: torch.Tensor = _Attention.apply(q, k, v, sequences, scale)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.sequences, ctx.scale = sequences, scale
        out = q.new_zeros(q.shape)
        for first, count, start, length in sequences:
            blocks = key_blocks(k[start : start + length], v[start : start + length])
            out[first : first + count] = attend_sequence(q[first : first + count], blocks, length, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
        for first, count, start, length in ctx.sequences:
            rows, keys = slice(first, first + count), slice(start, start + length)
            of_queries = q[rows], dout[rows], dq[rows]
            _gradients(*of_queries, k[keys], v[keys], dk[keys], dv[keys], ctx.scale)
        return dq, dk, dv, None, None


def attend_sequence(q: torch.Tensor, blocks: KeyBlocks, length: int, scale: float) -> torch.Tensor:
    """Return the attention [n, H, D], in fp32, of the last n of `length` positions: q [n, H, D]."""
    (n, heads, width), groups = q.shape, blocks.keys.shape[0]
    shared = heads // groups
    queries = q.permute(1, 0, 2).to(torch.float32).reshape(groups, shared, n, width)
    out = queries.new_empty(groups, shared, n, width)
    at = torch.arange(length - n, length, device=q.device)
    if shared * n <= QUERIES:  # the queries of a group's heads side by side
        made = _attend_rows(
            queries.reshape(groups, shared * n, width), blocks, at.repeat(shared), length - n, length, scale
        )
        out.copy_(made.view(out.shape))
    else:
        for first in range(0, n, QUERIES):
            last = min(first + QUERIES, n)
            seen = length - n + last
            for head in range(shared):
                out[:, head, first:last] = _attend_rows(
                    queries[:, head, first:last], blocks, at[first:last], length - n + first, seen, scale
                )
    return out.view(heads, n, width).transpose(0, 1)


def attend_last(q: torch.Tensor, blocks: KeyBlocks, lengths: list[int], scale: float) -> torch.Tensor:
    """Return the attention [S, H, D], in fp32, of the last position of each of S sequences, in one call.

    q [S, H, D]; the blocks of all sequences, [S G, m, D], where m is the longest; `lengths`: the keys of each.
    """
    count, heads, width = q.shape
    groups = blocks.keys.shape[0] // count
    queries = q.to(torch.float32).reshape(count * groups, heads // groups, width)
    at = torch.tensor(lengths, device=q.device).sub_(1).repeat_interleave(groups).unsqueeze(1)
    made = _attend_rows(queries, blocks, at.expand(-1, queries.shape[1]), min(lengths) - 1, max(lengths), scale)
    return made.reshape(count, heads, width)


def _attend_rows(
    q: torch.Tensor, blocks: KeyBlocks, at: torch.Tensor, least: int, seen: int, scale: float
) -> torch.Tensor:
    """Return the attention [G, r, D] of at most `QUERIES` rows q [G, r, D], at positions `at` [r] or [G, r].

    least, seen: the least position, and the keys that the last row sees.
    """
    groups, rows, width = q.shape
    filled = next(size for size in FEWER if size >= rows)
    if filled > rows:
        q = torch.cat([q, q.new_zeros(groups, filled - rows, width)], 1)
        at = torch.cat([at, at[..., -1:].expand(*at.shape[:-1], filled - rows)], -1)
    end = seen + -seen % KEYS
    at_once = max(1, SCORES // (filled * end))
    made = [
        _attend_heads(
            q[head : head + at_once],
            blocks.keys[head : head + at_once, :end],
            blocks.values[head : head + at_once, :end],
            at if at.dim() == 1 else at[head : head + at_once],
            least // KEYS * KEYS,
            scale,
        )
        for head in range(0, groups, at_once)
    ]
    return (made[0] if len(made) == 1 else torch.cat(made))[:, :rows]


def _attend_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, masked: int, scale: float
) -> torch.Tensor:
    """Return the attention [G, R, D] of q [G, R, D] over k and v [G, e, D]; every row sees the keys before `masked`."""
    groups, end, width = k.shape
    rows, count = q.shape[1], end // KEYS
    weights = multiply_batches(q, k.transpose(1, 2)).mul_(scale)
    unseen = torch.arange(masked, end, device=q.device) > at.unsqueeze(-1)
    weights[:, :, masked:].masked_fill_(unseen, -torch.inf)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    by_block = weights.view(groups, rows, count, KEYS)
    totals = sum_in_order(by_block.sum(-1), 2)
    x = by_block.transpose(1, 2).reshape(groups * count, rows, KEYS) if groups > 1 else by_block[0].transpose(0, 1)
    products = multiply_batches(x, v.reshape(groups * count, KEYS, width))
    return sum_in_order(products.view(groups, count, rows, width), 1).div_(totals.unsqueeze(-1))


def sum_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum of x along a dimension, in one binary tree; zeros at the end change nothing. x may be changed."""
    while (count := x.shape[dim]) > 1:
        paired = x.narrow(dim, 0, count - count % 2)
        pairs = paired.view(*x.shape[:dim], count // 2, 2, *x.shape[dim + 1 :])
        summed = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
        x = torch.cat([summed, x.narrow(dim, count - 1, 1)], dim) if count % 2 else summed
    return x.squeeze(dim)


def _gradients(
    q: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
) -> None:
    """Write the gradients of a sequence to dq [n, H, D], dk and dv [m, G, D].

    A head of keys at a time, in one order: its bits do not depend on the heads beside it.
    """
    n, heads, _ = q.shape
    length, groups, _ = k.shape
    shared = heads // groups
    at = torch.arange(length - n, length, device=q.device).unsqueeze(1)
    place = torch.arange(length, device=q.device)
    for group in range(groups):
        keys, values = (each[:, group].to(torch.float32).contiguous() for each in (k, v))
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for head in range(group * shared, (group + 1) * shared):
            for first in range(0, n, QUERIES):
                rows = slice(first, min(first + QUERIES, n))
                seen = length - n + rows.stop
                query, dy = (each[rows, head].to(torch.float32).contiguous() for each in (q, dout))
                scores = torch.mm(query, keys[:seen].t()).mul_(scale).masked_fill_(place[:seen] > at[rows], -torch.inf)
                weights = scores.softmax(-1)
                dvalues[:seen].addmm_(weights.t(), dy)
                dweights = torch.mm(dy, values[:seen].t())
                inner = (dweights * weights).sum(-1, keepdim=True)
                dscores = dweights.sub_(inner).mul_(weights).mul_(scale)
                dkeys[:seen].addmm_(dscores.t(), query)
                dq[rows, head] = torch.mm(dscores, keys[:seen]).to(dq.dtype)
        dk[:, group], dv[:, group] = dkeys.to(dk.dtype), dvalues.to(dv.dtype)
