"""scaled_dot_product_attention: shards batch, heads (of queries and keys in proportion) or the query length."""

from __future__ import annotations

from typing import Any

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, place
from ascend_parallel.sharding.rules.registry import OpPlacements, register_rule


def attention(call: OpCall) -> list[OpPlacements]:
    """Shard batch, heads or L: query [..., Hq, L, E], key and value [..., Hkv, S, E], mask -> [..., Hq, L, S].

    With enable_gqa a rank has Hkv / R key heads and the Hq / R query heads that use them. The query length L can be
    sharded where the mask is not causal; keys and values are then partial_grad.
    """
    named, dims = arguments(call), len(call.outputs[0].shape)
    grouped = bool(named.get("enable_gqa"))
    axes = [_batch_axis(call, dim, grouped and dim == dims - 3) for dim in range(dims - 2)]
    if not named["is_causal"]:
        mask = place(named["attn_mask"])
        tall = [mask is not None and len(meta.shape) > 1 and meta.shape[-2] > 1 for meta in call.inputs]
        own = [len(meta.shape) - 2 if tall[index] and index == mask else None for index, meta in enumerate(call.inputs)]
        own[0] = len(call.inputs[0].shape) - 2
        axes.append(Axis(tuple(own), (dims - 2,)))
    return cut(call, axes)


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
    return cut(call, [Axis((dim,) * len(call.inputs), (dim,) * len(call.outputs)) for dim in (0, 1)])


def register() -> None:
    """Register this file's rules."""
    register_rule("aten.scaled_dot_product_attention", attention)
    register_rule("aten._scaled_dot_product_flash_attention_for_cpu", flash_on_cpu)
