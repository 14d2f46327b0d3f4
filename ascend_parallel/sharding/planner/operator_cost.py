"""The time in which a rank computes its part of an operator, and the collectives that an operator runs itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.sharding.graph import OpCall, TensorMeta
from ascend_parallel.sharding.layout import REPLICATE, Layout, Placement, Shape, cuts, shard
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.redistribute.costs import MeshCosts, sent
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.rules import Exchange, Reduction, attention, experts, npu, own_collectives
from ascend_parallel.tuning.cost_model.cost import ATTENTION_BACKWARD, ELEMENTWISE_BACKWARD, CostModel

MATMULS = ("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "npu_linear", "npu_bmmV2")
# Attention is priced as a kernel that writes no scores, which devices have; what it keeps is counted so too
# (`runtime/activation_memory.py`).
ATTENTION = "scaled_dot_product_attention"
# Operators whose results share the memory of their input: no bytes move. A reshape after a transpose copies.
VIEWS = """
    alias detach expand permute select slice split split_with_sizes chunk unbind squeeze t transpose unflatten unsqueeze
    view
"""
FREE = frozenset(f"{VIEWS} flatten".split())
# Readers of rows of a table: of the table only these rows are read.
TABLES = ("embedding",)
# Losses that write, in forward, as much as they read: the logarithms of the softmax, which backward reads.
LOSSES = ("cross_entropy_loss",)


def passes(call: OpCall, option: Option, mesh_shape: tuple[int, ...], model: CostModel) -> tuple[float, float]:
    """Return the seconds of a rank's part of `call` under `option`, forward and backward, without its collectives."""
    inputs = [_local(meta, layout, mesh_shape) for meta, layout in zip(call.inputs, option.inputs, strict=True)]
    outputs = [_local(meta, layout, mesh_shape) for meta, layout in zip(call.outputs, option.outputs, strict=True)]
    itemsize = call.outputs[0].dtype.itemsize if call.outputs else 0
    if attention.exchange_dims(call, option.inputs):  # each rank's queries read the keys of the whole sequence
        inputs[1] = (*inputs[1][:-2], call.inputs[1].shape[-2], inputs[1][-1])
    attended = _attention(call, inputs)
    if attended is not None:
        forward = model.attention(*attended, itemsize)
        return forward, ATTENTION_BACKWARD * forward
    if call.operator == experts.OPERATOR:
        moved = model.stream(itemsize * experts.moved_elements(call, inputs, option.inputs, mesh_shape))
        forward, backward = moved, ELEMENTWISE_BACKWARD * moved
        for count, product in experts.products(call, inputs, option.inputs, mesh_shape):
            once, back = model.products(*product, itemsize)
            forward, backward = forward + count * once, backward + count * back
        return forward, backward
    count, matmul = _matmuls(call, inputs, outputs, option.inputs, mesh_shape)
    if matmul is not None:
        forward, backward = model.products(*matmul, itemsize)
        return count * forward, count * backward
    if call.operator in FREE:  # the gradients of several parts of a tensor are joined
        return 0.0, model.elementwise(2 * _bytes(call.inputs, inputs)) if len(outputs) > 1 else 0.0
    read, written = _bytes(call.inputs, inputs), _bytes(call.outputs, outputs)
    if call.operator in TABLES:
        read = written
    if call.operator in LOSSES:
        return model.elementwise(2 * read), model.elementwise(2 * read)
    forward = model.elementwise(read + written)
    return forward, ELEMENTWISE_BACKWARD * forward


def seconds(call: OpCall, option: Option, mesh_shape: tuple[int, ...], model: CostModel) -> float:
    """Return the time of a rank's part of `call` under `option`, forward and backward, without its collectives."""
    return sum(passes(call, option, mesh_shape, model))


def _bytes(metas: Sequence[TensorMeta], shapes: Sequence[Shape]) -> float:
    return sum(prod(shape) * meta.dtype.itemsize for shape, meta in zip(shapes, metas, strict=True))


def _attention(call: OpCall, inputs: Sequence[Shape]) -> tuple[float, int, int] | None:
    """Return the pairs of queries and keys that attention computes, and their widths; None: no attention."""
    if call.operator.startswith(npu.ATTENTION):
        rows, width, keys = npu.attention_matmuls(call, inputs)
        return rows * keys / (2 if npu.is_causal(call) else 1), width, width
    if call.operator != ATTENTION:
        return None
    query, key, value = inputs[:3]
    is_causal = call.kwargs.get("is_causal", call.args[5] if len(call.args) > 5 else False)
    return prod(query[:-1]) * key[-2] / (2 if is_causal else 1), query[-1], value[-1]


def amount(call: OpCall) -> float:
    """Return the work of a whole operator: multiply-adds of matmuls and attention, else output elements."""
    return multiply_adds(call) or float(sum(prod(meta.shape) for meta in call.outputs))


def multiply_adds(call: OpCall) -> float:
    """Return the multiply-adds of the matmuls of a whole operator's forward, and of attention's scores; else 0."""
    outputs = [meta.shape for meta in call.outputs]
    count, matmul = _matmuls(call, [meta.shape for meta in call.inputs], outputs, [()] * len(call.inputs), ())
    return 0.0 if matmul is None else float(count * prod(matmul))


def _matmuls(
    call: OpCall, inputs: list[Shape], outputs: list[Shape], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> tuple[int, tuple[int, int, int] | None]:
    """Return the number of the forward's matmuls, and their M, K, N; batches count as rows; None: no matmul."""
    name = call.operator
    if name in MATMULS and inputs and outputs:
        first = inputs[1] if name in ("addmm", "baddbmm") else inputs[0]
        inner, columns = first[-1] if first else 1, outputs[0][-1] if outputs[0] else 1
        return 1, (max(prod(outputs[0]) // max(columns, 1), 1), max(inner, 1), max(columns, 1))
    if name == ATTENTION:
        query, key = inputs[0], inputs[1]
        return 2, (prod(query[:-1]), query[-1], key[-2])
    if name.startswith(npu.ATTENTION):
        return 2, npu.attention_matmuls(call, inputs)
    if name == experts.OPERATOR:
        return experts.matmuls(call, inputs, layouts, mesh_shape)
    if name == "conv2d":
        return 1, (prod(outputs[0]) // outputs[0][1], prod(inputs[1][1:]), outputs[0][1])
    return 0, None


def _local(meta: TensorMeta, layout: Layout, mesh_shape: tuple[int, ...]) -> Shape:
    counts = cuts(layout, mesh_shape, len(meta.shape))
    return tuple(size // count for size, count in zip(meta.shape, counts, strict=True))


def op_collective_steps(call: OpCall, layouts: Sequence[Layout], costs: MeshCosts) -> tuple[RedistributeStep, ...]:
    """Return the collectives that an operator runs in a step, with inputs in these layouts."""
    return tuple(own_step(own, costs) for own in own_collectives(call, layouts, costs.shape))


def own_step(own: Reduction | Exchange, costs: MeshCosts) -> RedistributeStep:
    """Return the step of a collective that an operator runs itself: an all-reduce, or one of an exchange of rows."""
    if isinstance(own, Reduction):
        kind, source, target = ALL_REDUCE, Placement("partial", op=own.op), REPLICATE
    else:
        kind, source, target = own.kind, shard(0), shard(0)
    nbytes, seconds = sent(kind, own.nbytes, costs.shape[own.mesh_dim]), costs.seconds(kind, own.nbytes, own.mesh_dim)
    return RedistributeStep(kind, own.mesh_dim, source, target, nbytes, seconds, own.backward)
