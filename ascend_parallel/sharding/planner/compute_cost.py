"""The time in which a rank computes its part of an operator, forward and backward: for the objective "time"."""

from __future__ import annotations

from math import prod

from ascend_parallel.sharding.graph import OpCall, TensorMeta
from ascend_parallel.sharding.layout import Layout, Shape, cuts
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.tuning.cost_model.cost import CostModel

MATMULS = ("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum")
# Backward of a matmul is two more matmuls of the same size; of a memory-bound operator, about two more passes.
PASSES = 3


def seconds(call: OpCall, option: Option, mesh_shape: tuple[int, ...], model: CostModel) -> float:
    """Return the time of a rank's part of `call` under `option`, forward and backward, without its collectives."""
    inputs = [_local(meta, layout, mesh_shape) for meta, layout in zip(call.inputs, option.inputs, strict=True)]
    outputs = [_local(meta, layout, mesh_shape) for meta, layout in zip(call.outputs, option.outputs, strict=True)]
    moved = sum(
        prod(shape) * meta.dtype.itemsize
        for shape, meta in zip([*inputs, *outputs], [*call.inputs, *call.outputs], strict=True)
    )
    name = _name(call)
    item = call.outputs[0].dtype.itemsize if call.outputs else 4
    if name in MATMULS and inputs and outputs:
        rows, inner, columns = _matmul(name, inputs, outputs[0])
        return PASSES * model.matmul(rows, inner, columns, item)
    if name == "scaled_dot_product_attention":
        query, key = inputs[0], inputs[1]
        rows = prod(query[:-1])
        return PASSES * 2 * model.matmul(rows, query[-1], key[-2], item)
    if name == "conv2d":
        return PASSES * model.matmul(prod(outputs[0]) // outputs[0][1], prod(inputs[1][1:]), outputs[0][1], item)
    return PASSES * model.stream(moved)


def amount(call: OpCall) -> float:
    """Return the work of a whole operator: multiply-adds of matmuls and attention, else output elements."""
    inputs, outputs, name = [meta.shape for meta in call.inputs], [meta.shape for meta in call.outputs], _name(call)
    if name in MATMULS and inputs and outputs:
        return float(prod(_matmul(name, inputs, outputs[0])))
    if name == "scaled_dot_product_attention":
        return 2.0 * prod(inputs[0]) * inputs[1][-2]
    if name == "conv2d":
        return float(prod(outputs[0]) * prod(inputs[1][1:]))
    return float(sum(map(prod, outputs)))


def _name(call: OpCall) -> str:
    return call.name.split(".")[1]


def _matmul(name: str, inputs: list[Shape], output: Shape) -> tuple[int, int, int]:
    """Return M, K, N of a matmul from the local shapes; batches count as rows."""
    first = inputs[1] if name in ("addmm", "baddbmm") else inputs[0]
    inner = first[-1] if first else 1
    columns = output[-1] if output else 1
    return max(prod(output) // max(columns, 1), 1), max(inner, 1), max(columns, 1)


def _local(meta: TensorMeta, layout: Layout, mesh_shape: tuple[int, ...]) -> Shape:
    counts = cuts(layout, mesh_shape, len(meta.shape))
    return tuple(size // count for size, count in zip(meta.shape, counts, strict=True))
