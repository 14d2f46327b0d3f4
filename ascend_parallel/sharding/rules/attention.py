"""scaled_dot_product_attention: of whole heads, of slices of the queries, or of sequences that ranks share.

    placements on a mesh dimension         queries    keys, values    output
    batch                                  S(0)       S(0)            S(0)
    heads                                  S(1)       S(1)            S(1)
    slices of the queries                  S(2)       whole           S(2)
    a shared sequence: an exchange         S(2)       S(2)            S(2)

The exchange is `run_attention` (overlap/context.py): heads are exchanged, or keys and values gathered, in overlapped
groups of heads. It is allowed where a search has given the call a `SharedSequence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

import torch

from ascend_parallel.ops.decision import Known, because
from ascend_parallel.ops.key_gather import EXCHANGES, GATHER, KeyGroup, lent_pieces
from ascend_parallel.overlap.context import Heads, attend_rows, run_attention
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE, Layout, largest_local_shape, shard
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, place, same
from ascend_parallel.sharding.rules.local import ExchangeRanks, Part
from ascend_parallel.sharding.rules.registry import Exchange, OpPlacements, register_rule
from ascend_parallel.tuning.cost_model.shared_attention import SharedAttention

NAME = "aten.scaled_dot_product_attention"
HEADS_DIM, SEQUENCE_DIM = 1, 2
"""Of queries, keys, values and outputs [B, N, S, D]."""


def attention(call: OpCall) -> list[OpPlacements]:
    """Shard batch, heads or L: query [..., Hq, L, E], key and value [..., Hkv, S, E], mask -> [..., Hq, L, S].

    With enable_gqa a rank has Hkv / R key heads and the Hq / R query heads that use them. Keys and values are
    partial_grad where the query length L is sharded (`run_slice`).
    """
    named, dims = arguments(call), len(call.outputs[0].shape)
    grouped = bool(named.get("enable_gqa"))
    axes = [_batch_axis(call, dim, grouped and dim == dims - 3) for dim in range(dims - 2)]
    mask = place(named["attn_mask"])
    tall = [mask is not None and len(meta.shape) > 1 and meta.shape[-2] > 1 for meta in call.inputs]
    own = [len(meta.shape) - 2 if tall[index] and index == mask else None for index, meta in enumerate(call.inputs)]
    own[0] = len(call.inputs[0].shape) - 2
    axes.append(Axis(tuple(own), (dims - 2,)))
    return [*cut(call, axes), *_shared(call)]


def _shared(call: OpCall) -> list[OpPlacements]:
    if call.sequence is None:
        return []
    cut_along = shard(SEQUENCE_DIM)
    others = (REPLICATE,) * (len(call.inputs) - 3)
    return [OpPlacements((cut_along, cut_along, cut_along, *others), (cut_along,))]


def run_slice(part: Part) -> Any:
    """Attend causally from this rank's queries: each sees the keys up to its own place in the whole sequence.

    Keys after the slice's last query are left out, so the first ranks compute less than the last ones.
    """
    start, stop = part.input_bounds(0)[-2]
    if not arguments(part.call)["is_causal"] or stop - start == part.call.inputs[0].shape[-2]:
        return part.run()
    seen = min(stop, part.call.inputs[1].shape[-2])
    key, value = (tensor.narrow(-2, 0, seen) for tensor in part.inputs[1:3])
    mask = _causal(slice(start, stop), seen, key.device)
    return part.run(key=key, value=value, attn_mask=mask, is_causal=False)


def _batch_axis(call: OpCall, dim: int, grouped: bool) -> Axis:
    """Return the axis of a batch dimension or of the heads; tensors of size 1 there are broadcast."""
    dims, size = len(call.outputs[0].shape), call.outputs[0].shape[dim]

    def of(meta: Any) -> int | None:
        own = dim - dims + len(meta.shape)
        return own if own >= 0 and (meta.shape[own] == size or (grouped and meta.shape[own] > 1)) else None

    return Axis(tuple(of(meta) for meta in call.inputs), (dim,))


def flash_on_cpu(call: OpCall) -> list[OpPlacements]:
    """Shard B or H of the decomposed CPU operator: [B, H, L, E], and log-sums [B, H, L]."""
    rest = [None if place(arguments(call).get("attn_mask")) == index else 0 for index in range(len(call.inputs))]
    if None in rest:
        return []
    return cut(call, same(call, (0, 1)))


def _causal(rows: slice, keys: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of some rows of a sequence, to its first keys."""
    return torch.ones(rows.stop - rows.start, keys, dtype=torch.bool, device=device).tril(rows.start)


def exchange_dims(call: OpCall, layouts: Sequence[Layout]) -> list[int]:
    """Return the mesh dimensions whose ranks share the sequence, and exchange heads or gather keys for it."""
    if call.sequence is None:
        return []
    along = zip(*layouts[:3], strict=True)
    return [dim for dim, placed in enumerate(along) if all(each == shard(SEQUENCE_DIM) for each in placed)]


def goes_together(call: OpCall, layouts: Sequence[Layout]) -> bool:
    """Tell whether at most one mesh dimension shares the sequence, and then no other cuts the queries' rows."""
    shared = exchange_dims(call, layouts)
    rows = [dim for dim, placed in enumerate(layouts[0]) if placed == shard(SEQUENCE_DIM)]
    return not shared or (rows == shared and len(rows) == 1)


def shared_attention(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> SharedAttention:
    """Return an attention whose sequence ranks share, as its price needs it."""
    (dim,) = exchange_dims(call, layouts)
    query, key, value = (
        largest_local_shape(call.inputs[place].shape, layouts[place], mesh_shape) for place in range(3)
    )
    batch, heads, tokens, width = query
    item = call.inputs[0].dtype.itemsize
    row = batch * tokens * item
    return SharedAttention(
        ranks=mesh_shape[dim],
        heads=heads,
        key_heads=key[HEADS_DIM] // _repeats(call, key[HEADS_DIM]),
        query=row * width,
        key=row * key[-1],
        value=row * value[-1],
        output=row * value[-1],
        lends=_lends(call, tokens),
    )


def _repeats(call: OpCall, heads: int) -> int:
    """Return the number of copies of each head among a rank's heads of keys."""
    assert call.sequence is not None
    return gcd(call.sequence.repeats, heads)


def _lends(call: OpCall, tokens: int) -> bool:
    """Tell whether ranks that gather keys lend each other half of their queries, of `tokens` rows of a rank."""
    return bool(arguments(call)["is_causal"]) and tokens > 1


def exchange_of(call: OpCall, shared: SharedAttention) -> tuple[str, int]:
    """Return the exchange and the groups that a call has, or would have if nobody chose."""
    assert call.sequence is not None
    exchange = call.sequence.exchange or next(filter(shared.allows, EXCHANGES))
    return exchange, min(call.sequence.groups or 1, shared.most_groups(exchange))


def collectives(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Exchange]:
    """Return the collectives of a step of an attention whose sequence ranks share, forward and backward."""
    return list(_collectives(call, layouts, mesh_shape))


def _collectives(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> Iterator[Exchange]:
    for dim in exchange_dims(call, layouts):
        if mesh_shape[dim] > 1:
            shared = shared_attention(call, layouts, mesh_shape)
            exchange, groups = exchange_of(call, shared)
            for direction in (FORWARD, BACKWARD):
                for kind, size in shared.sent(exchange, direction):
                    yield from [Exchange(dim, size / groups, kind, backward=direction == BACKWARD)] * groups


def saved_bytes(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> float:
    """Return the bytes that a rank keeps for backward of an attention whose sequence ranks share, beside its sums."""
    shared = shared_attention(call, layouts, mesh_shape)
    return shared.kept(exchange_of(call, shared)[0])


def run(part: Part) -> Any:
    """Run a rank's part."""
    shared = [dim for dim in exchange_dims(part.call, part.input_layouts) if part.mesh_shape[dim] > 1]
    return run_shared(part, shared[0]) if shared else run_slice(part)


def run_shared(part: Part, dim: int) -> torch.Tensor:
    """Attend from this rank's tokens to the whole sequence, with the ranks along a mesh dimension.

    The output [B, N, s, D] lies in memory as attention's on CPUs: tokens before heads. It may have the product of the
    linear layer that follows (overlap/projected.py).
    """
    call, ranks = part.call, part.exchange_ranks(dim)
    exchange, groups = exchange_of(call, shared_attention(call, part.input_layouts, part.mesh_shape))
    known = Known(number=groups, because=because("planned"))
    q, k, v = part.inputs[:3]
    once = _repeats(call, k.shape[HEADS_DIM])
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k[:, ::once], v[:, ::once]))
    attention, group = _Attention(part, ranks), ranks.group
    borrower = attention.borrower if exchange == GATHER and _lends(call, len(q)) else None
    o = run_attention(
        q,
        k,
        v,
        attention,
        group=group,
        settings=ranks.settings,
        known=known,
        exchange=exchange,
        borrower=borrower,
        projection=ranks.projection,
    )
    return o.permute(1, 0, 2, 3).contiguous().transpose(1, 2)


class _Attention:
    """The attention of a rank of those that share a sequence, for `run_attention`; all tensors are [S, B, n, D]."""

    def __init__(self, part: Part, ranks: ExchangeRanks) -> None:
        self._part, self._place = part, ranks.places[ranks.group.rank()]
        named = arguments(part.call)
        mask = place(named["attn_mask"])
        self._mask, self._causal = None if mask is None else part.inputs[mask], bool(named["is_causal"])
        # The ranks of the group in the order of the sequence; torch orders a group by global rank.
        self._in_order = sorted(range(len(ranks.places)), key=ranks.places.__getitem__)

    def __call__(self, heads: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention of whole heads, or of the rows that this rank has."""
        if isinstance(heads, KeyGroup):
            k, v = self._ordered(k), self._ordered(v)
            return attend_rows(self._of_rows, self._pieces(len(q)), q, k, v, causal=self._causal)
        o = self._run(*map(self._ordered, (q, k, v)))
        back = sorted(range(len(self._in_order)), key=self._in_order.__getitem__)
        return _reordered(o, back)

    @property
    def borrower(self) -> int:
        """The rank of the group that has the mirrored part of the sequence."""
        return self._in_order[len(self._in_order) - 1 - self._place]

    def _pieces(self, rows: int) -> Sequence[slice]:
        if _lends(self._part.call, rows):
            return lent_pieces(self._place, len(self._in_order), rows)
        return (slice(self._place * rows, (self._place + 1) * rows),)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return _reordered(x, self._in_order)

    def _of_rows(self, rows: slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._causal:
            return self._run(q, k, v, attn_mask=_causal(rows, len(k), k.device), is_causal=False)
        if self._mask is None or self._mask.dim() < 2 or self._mask.shape[-2] == 1:
            return self._run(q, k, v)
        return self._run(q, k, v, attn_mask=self._mask[..., rows, :])

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changed: Any) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        changed["enable_gqa"] = query.shape[1] != key.shape[1]
        o: torch.Tensor = self._part.run(query=query, key=key, value=value, **changed)
        return o.permute(2, 0, 1, 3)


def _reordered(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return rows x [S, ...] with the parts of the ranks in another order."""
    if list(order) == list(range(len(order))):
        return x
    parts = x.chunk(len(order))
    return torch.cat([parts[index] for index in order])


def register() -> None:
    """Register this file's rules."""
    register_rule(NAME, attention, run, collectives, goes_together)
    register_rule("aten._scaled_dot_product_flash_attention_for_cpu", flash_on_cpu)
