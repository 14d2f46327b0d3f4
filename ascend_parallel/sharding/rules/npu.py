"""Fused operators of torch_npu, for Ascend: attention, norms, rotary embeddings, gated and other activations.

Registered by name, so torch_npu is not imported. Shapes and arguments are those of the schemas and meta kernels of the
torch_npu 2.13.0 wheel. An argument that a rule does not know leaves the operator whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ascend_parallel.sharding.graph import OpCall, Ref
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.rules.axes import Axis, aligned, arguments, cut, linear_in, place, same
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.matmul import linear, run_biased
from ascend_parallel.sharding.rules.pointwise import pointwise, unary_linear
from ascend_parallel.sharding.rules.reductions import along
from ascend_parallel.sharding.rules.registry import OpPlacements, register_rule

ATTENTION = "npu_fusion_attention"
# Values of npu_fusion_attention's sparse_mode.
CAUSAL = (2, 3)
# The dimensions of batch, heads and sequence. In BSH and SBH the last dimension has the heads, one after the other. TND
# has the sequences of a batch one after the other.
BATCH_HEADS_SEQUENCE = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "BSH": (0, 2, 1), "SBH": (1, 2, 0), "TND": (None, 1, 0)}
# Arguments of attention that describe single samples, or bits of a whole mask: with them the batch, or nothing, is cut.
OF_SAMPLES = ("prefix", "actual_seq_qlen", "actual_seq_kvlen", "q_start_idx", "kv_start_idx")
UNKNOWN = ("padding_mask", "dropout_mask")
ELEMENTWISE = "npu_gelu npu_fast_gelu npu_silu npu_mish"


def attention(call: OpCall) -> list[OpPlacements]:
    """npu_fusion_attention: shard the batch or the heads of queries, keys, values, masks, and of the softmax's sums.

    query   [B, N, Sq, D] in the order of input_layout; key and value have N or fewer heads
    outputs attention as the query; softmax_max, softmax_sum [B, N, Sq, 8], in TND [T, N, 8]; an empty tensor

    Heads of fused dimensions (BSH, SBH) are sharded where keys have as many heads as queries. Their slices are whole
    heads, because softmax_max has the heads in a dimension of its own.
    """
    named = arguments(call)
    order = named["input_layout"]
    if order not in BATCH_HEADS_SEQUENCE or named.get("softmax_layout") or named.get("pse_type", 1) != 1:
        return []
    if any(named.get(name) is not None for name in UNKNOWN):
        return []
    batch, heads, _ = BATCH_HEADS_SEQUENCE[order]
    axes = []
    if batch is not None and not any(named.get(name) for name in OF_SAMPLES):
        axes.append(Axis(_places(call, named, batch, 0), (batch, 0, 0, *_empty(call)), REPLICATE))
    fused = order in ("BSH", "SBH")
    if not fused or _shape(call, named, "query")[-1] == _shape(call, named, "key")[-1]:
        axes.append(Axis(_places(call, named, heads, 1), (heads, 1, 1, *_empty(call)), REPLICATE))
    return cut(call, axes)


def _places(call: OpCall, named: Mapping[str, Any], dim: int, of_scores: int) -> tuple[int | None, ...]:
    """Return the dimension of each input: `dim` of queries, keys and values; `of_scores` of masks [B, N, Sq, Skv]."""
    found: list[int | None] = [None] * len(call.inputs)
    scores = call.outputs[1].shape
    for name in ("query", "key", "value", "query_rope", "key_rope"):
        if isinstance(ref := named.get(name), Ref) and call.inputs[ref.index].shape[dim] > 1:
            found[ref.index] = dim
    for name in ("pse", "atten_mask"):
        if isinstance(ref := named.get(name), Ref):
            shape = call.inputs[ref.index].shape
            own = len(shape) == 4 and len(scores) == 4 and shape[of_scores] == scores[of_scores] > 1
            found[ref.index] = of_scores if own else None
    if isinstance(ref := named.get("sink"), Ref):
        found[ref.index] = 0 if of_scores == 1 else None
    return tuple(found)


def _empty(call: OpCall) -> tuple[None, ...]:
    return (None,) * (len(call.outputs) - 3)


def _shape(call: OpCall, named: Mapping[str, Any], name: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = call.inputs[named[name].index].shape
    return shape


def run_attention(part: Part) -> Any:
    """Attend with the local number of heads."""
    named = arguments(part.call)
    _, heads, _ = BATCH_HEADS_SEQUENCE.get(named["input_layout"], (None, 0, None))
    query = named["query"].index
    local, whole = part.inputs[query].shape[heads], part.call.inputs[query].shape[heads]
    return part.run(head_num=named["head_num"] * local // whole)


def attention_matmuls(call: OpCall, inputs: Sequence[tuple[int, ...]]) -> tuple[int, int, int]:
    """Return rows, D and Skv of the two matmuls of an attention whose inputs have these shapes on a rank."""
    named = arguments(call)
    order = named["input_layout"]
    query, key = inputs[named["query"].index], inputs[named["key"].index]
    whole = _shape(call, named, "query")
    width = whole[-1] // named["head_num"] if order in ("BSH", "SBH") else whole[-1]
    return max(prod(query) // width, 1), width, key[BATCH_HEADS_SEQUENCE.get(order, (0, 1, 0))[2]]


def is_causal(call: OpCall) -> bool:
    """Tell whether an attention computes half of its scores: sparse_mode leftUpCausal or rightDownCausal."""
    return arguments(call).get("sparse_mode") in CAUSAL


def rms_norm(call: OpCall) -> list[OpPlacements]:
    """Shard a dimension before those of gamma, which is partial_grad.

    npu_rms_norm(x, gamma) -> y, rstd; npu_add_rms_norm(x1, x2, gamma) -> y, rstd, x1 + x2.
    """
    *tensors, gamma = call.inputs
    return cut(call, same(call, range(len(tensors[0].shape) - len(gamma.shape)), len(tensors)))


def rotary_mul(call: OpCall) -> list[OpPlacements]:
    """npu_rotary_mul(x, r1, r2): shard a dimension before the last; sines and cosines are broadcast."""
    axes = aligned(call, range(len(call.outputs[0].shape) - 1))
    rotate = place(arguments(call).get("rotate"))
    if rotate is None:
        return cut(call, axes)
    return cut(call, [Axis(_without(axis.inputs, rotate), axis.outputs) for axis in axes])


def _without(dims: tuple[int | None, ...], index: int) -> tuple[int | None, ...]:
    return (*dims[:index], None, *dims[index + 1 :])


def apply_rotary(call: OpCall) -> list[OpPlacements]:
    """npu_apply_rotary_pos_emb(query, key, cos, sin) -> query, key: shard a dimension before the last of both."""
    query, key, *tables = (meta.shape for meta in call.inputs)
    axes = []
    for dim in range(len(query) - 1):
        of_tables = (dim if len(table) == len(query) and table[dim] == query[dim] else None for table in tables)
        of_key = dim if key[dim] > 1 else None
        if of_key is not None:
            axes.append(Axis((dim, of_key, *of_tables), (dim, of_key)))
    return cut(call, axes)


def masked_softmax(call: OpCall) -> list[OpPlacements]:
    """npu_scaled_masked_softmax(x, mask): shard batch or heads; rows of scores too, where the mask is given."""
    rows = () if arguments(call)["fixed_triu_mask"] else (2,)
    return cut(call, aligned(call, (0, 1, *rows)))


def batched_product(call: OpCall) -> list[OpPlacements]:
    """npu_bmmV2 without output sizes: shard the batch; linear in each factor."""
    if arguments(call)["output_sizes"] or any(len(meta.shape) != 3 for meta in call.inputs):
        return []
    return cut(call, [Axis((0, 0), (0,)), Axis((1, None), (1,)), Axis((None, 2), (2,))]) + linear_in(call, [0], [1])


def register() -> None:
    """Register this file's rules."""
    for name in (ATTENTION, f"{ATTENTION}_v2"):
        register_rule(f"npu.{name}", attention, run_attention)
    for name in ("npu_rms_norm", "npu_add_rms_norm"):
        register_rule(f"npu.{name}", rms_norm)
    register_rule("npu.npu_rotary_mul", rotary_mul)
    register_rule("npu.npu_apply_rotary_pos_emb", apply_rotary)
    for name in ("npu_swiglu", "npu_geglu"):
        register_rule(f"npu.{name}", along)
    for name in ELEMENTWISE.split():
        register_rule(f"npu.{name}", pointwise)
    register_rule("npu.npu_dtype_cast", unary_linear)
    register_rule("npu.npu_scaled_masked_softmax", masked_softmax)
    register_rule("npu.npu_linear", linear, run_biased)
    register_rule("npu.npu_bmmV2", batched_product)
