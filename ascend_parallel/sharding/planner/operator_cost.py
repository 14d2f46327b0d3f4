"""The time in which a rank computes its part of an operator, and the collectives that an operator runs itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ascend_parallel.sharding.graph import OpCall, TensorMeta
from ascend_parallel.sharding.layout import REPLICATE, Layout, Placement, Shape, cuts, shard
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.redistribute.costs import ALL_REDUCE, ALL_TO_ALL, MeshCosts, sent
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.rules import AllToAll, Reduction, experts, npu, own_collectives
from ascend_parallel.tuning.cost_model.cost import CostModel

MATMULS = ("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "npu_linear", "npu_bmmV2")
# Backward of a matmul is two more matmuls of the same size; of a memory-bound operator, about two more passes.
PASSES = 3


def seconds(call: OpCall, option: Option, mesh_shape: tuple[int, ...], model: CostModel) -> float:
    """Return the time of a rank's part of `call` under `option`, forward and backward, without its collectives."""
    inputs = [_local(meta, layout, mesh_shape) for meta, layout in zip(call.inputs, option.inputs, strict=True)]
    outputs = [_local(meta, layout, mesh_shape) for meta, layout in zip(call.outputs, option.outputs, strict=True)]
    count, matmul = _matmuls(call, inputs, outputs, option.inputs, mesh_shape)
    if matmul is not None:
        return PASSES * count * model.matmul(*matmul, call.outputs[0].dtype.itemsize)
    shapes, metas = [*inputs, *outputs], [*call.inputs, *call.outputs]
    return PASSES * model.stream(
        sum(prod(shape) * meta.dtype.itemsize for shape, meta in zip(shapes, metas, strict=True))
    )


def amount(call: OpCall) -> float:
    """Return the work of a whole operator: multiply-adds of matmuls and attention, else output elements."""
    outputs = [meta.shape for meta in call.outputs]
    count, matmul = _matmuls(call, [meta.shape for meta in call.inputs], outputs, [()] * len(call.inputs), ())
    return float(sum(map(prod, outputs)) if matmul is None else count * prod(matmul))


def _matmuls(
    call: OpCall, inputs: list[Shape], outputs: list[Shape], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> tuple[int, tuple[int, int, int] | None]:
    """Return how many matmuls the forward runs, and their M, K, N; batches count as rows; None: no matmul."""
    name = call.operator
    if name in MATMULS and inputs and outputs:
        first = inputs[1] if name in ("addmm", "baddbmm") else inputs[0]
        inner, columns = first[-1] if first else 1, outputs[0][-1] if outputs[0] else 1
        return 1, (max(prod(outputs[0]) // max(columns, 1), 1), max(inner, 1), max(columns, 1))
    if name == "scaled_dot_product_attention":
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


def own_step(own: Reduction | AllToAll, costs: MeshCosts) -> RedistributeStep:
    """Return the step of a collective that an operator runs itself: an all-reduce, or an all-to-all of rows."""
    kind, source, target = ALL_TO_ALL, shard(0), shard(0)
    if isinstance(own, Reduction):
        kind, source, target = ALL_REDUCE, Placement("partial", op=own.op), REPLICATE
    nbytes, seconds = sent(kind, own.nbytes, costs.shape[own.mesh_dim]), costs.seconds(kind, own.nbytes, own.mesh_dim)
    return RedistributeStep(kind, own.mesh_dim, source, target, nbytes, seconds)
