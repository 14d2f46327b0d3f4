"""Operators that read or write rows or elements by index: embedding, gather, index_select, x[ids], scatter, one_hot."""

from __future__ import annotations

from typing import Any

import torch

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import SUM
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, linear_in, normal, other_dims, place, same
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.reductions import leading
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all, register_rule


def embedding(call: OpCall) -> list[OpPlacements]:
    """weight [V, H], ids [...]: shard the ids, H, or V (partial sums: exactly one rank has the row of an id)."""
    ids = len(call.inputs[1].shape)
    columns = Axis((1, None), (ids,))
    if arguments(call)["scale_grad_by_freq"]:
        return cut(call, [columns])  # frequencies count all ids
    return cut(call, [*(Axis((None, dim), (dim,)) for dim in range(ids)), columns, Axis((0, None), (None,), SUM)])


def run_embedding(part: Part) -> Any:
    """Look up the ids of this rank's rows; other ids give zeros."""
    weight, ids = part.inputs
    named = arguments(part.call)
    start, stop = part.input_bounds(0)[0]
    if stop - start == part.call.inputs[0].shape[0]:
        return part.run()
    torch._assert_async(
        ((ids >= 0) & (ids < part.call.inputs[0].shape[0])).all(), "an id is beyond the embedding's rows"
    )
    elsewhere = (ids < start) | (ids >= stop)
    padding = normal(named["padding_idx"], part.call.inputs[0].shape[0]) if named["padding_idx"] != -1 else -1
    padding = padding - start if start <= padding < stop else -1
    own = (ids - start).masked_fill(elsewhere, 0)
    rows = torch.ops.aten.embedding(weight, own, padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def gather(call: OpCall) -> list[OpPlacements]:
    """Shard a dimension other than `dim` where tensor and index have the same size, or the index along `dim`."""
    tensor, index = call.inputs[0].shape, call.inputs[1].shape
    if not tensor:
        return []
    dim = normal(arguments(call)["dim"], len(tensor))
    axes = same(call, [axis for axis in other_dims(call, dim) if tensor[axis] == index[axis]])
    return cut(call, [*axes, Axis((None, dim), (dim,))]) + linear_in(call, [0])


def index_select(call: OpCall) -> list[OpPlacements]:
    """Shard a dimension other than `dim`, or the ids."""
    dim = normal(arguments(call)["dim"], len(call.inputs[0].shape))
    axes = same(call, other_dims(call, dim), inputs=1)
    return cut(call, [*axes, Axis((None, 0), (dim,))] if call.inputs[1].shape else axes) + linear_in(call, [0])


def index(call: OpCall) -> list[OpPlacements]:
    """x[ids, ...]: shard a dimension that is not indexed, or a dimension of the broadcast ids."""
    dims, shape = len(call.inputs[0].shape), call.outputs[0].shape
    indices = list(arguments(call)["indices"])
    indexed = [dim for dim, ids in enumerate(indices) if ids is not None]
    places = [place(ids) for ids in indices if ids is not None]
    if not _adjacent_integers(call, indexed, places):
        return []
    width = len(shape) - (dims - len(indexed))  # dimensions of the ids
    axes = []
    for dim in range(dims):
        if dim not in indexed:
            out = dim if dim < indexed[0] else dim - len(indexed) + width
            axes.append(Axis((dim, *(None for _ in places)), (out,)))
    for dim in range(width):
        axes.append(_ids_axis(call, dim, width, indexed[0] + dim))
    return cut(call, axes) + linear_in(call, [0])


def _adjacent_integers(call: OpCall, indexed: list[int], places: list[int | None]) -> bool:
    """Tell whether the indices are integer inputs of adjacent dimensions.

    A boolean index gives as many elements as are true; ids of dimensions apart move to the front of the output.
    """
    boolean = any(call.inputs[index].dtype in (torch.bool, torch.uint8) for index in places if index is not None)
    return not boolean and None not in places and indexed == list(range(indexed[0], indexed[0] + len(indexed)))


def _ids_axis(call: OpCall, dim: int, width: int, out: int) -> Axis:
    size = call.outputs[0].shape[out]
    own = [dim - width + len(meta.shape) for meta in call.inputs[1:]]
    pairs = zip(call.inputs[1:], own, strict=True)
    return Axis((None, *(axis if axis >= 0 and meta.shape[axis] == size else None for meta, axis in pairs)), (out,))


def scatter(call: OpCall) -> list[OpPlacements]:
    """Shard a dimension other than `dim` where tensor, index and source have the same size."""
    named, shape = arguments(call), call.inputs[0].shape
    if not shape:
        return []
    axes = [dim for dim in other_dims(call, named["dim"]) if len({meta.shape[dim] for meta in call.inputs}) == 1]
    linear = "add" in call.name or place(named.get("src")) is not None
    return cut(call, same(call, axes)) + (linear_in(call, [0, 2]) if linear and "reduce" not in named else [])


def index_written(call: OpCall) -> list[OpPlacements]:
    """index_add, index_copy, index_fill: shard a dimension other than `dim`; the ids stay whole."""
    dims, named = len(call.inputs[0].shape), arguments(call)
    if not dims:
        return []
    own = [
        Axis(
            tuple(
                axis if len(meta.shape) == dims and index != place(named["index"]) else None
                for index, meta in enumerate(call.inputs)
            ),
            (axis,),
        )
        for axis in other_dims(call, named["dim"])
    ]
    return cut(call, own) + (linear_in(call, [0, 2]) if place(named.get("source")) is not None else [])


def index_put(call: OpCall) -> list[OpPlacements]:
    """x[ids, ...] = values: shard a dimension that is not indexed."""
    named, shape = arguments(call), call.inputs[0].shape
    indices = list(named["indices"])
    indexed = [dim for dim, ids in enumerate(indices) if ids is not None]
    places, values = [place(ids) for ids in indices if ids is not None], place(named["values"])
    if values is None or not _adjacent_integers(call, indexed, places):
        return []
    width = max(len(call.inputs[index].shape) for index in places if index is not None)
    dims, meta = len(shape) - len(indexed) + width, call.inputs[values]
    axes = []
    for dim in (axis for axis in range(len(shape)) if axis not in indexed):
        own = (dim if dim < indexed[0] else dim - len(indexed) + width) - dims + len(meta.shape)
        of_values = own if own >= 0 and meta.shape[own] == shape[dim] else None
        axes.append(Axis((dim, *(None for _ in places), of_values), (dim,)))
    return cut(call, axes)


def run_one_hot(part: Part) -> Any:
    """Pass the whole output's number of classes, which the operator would otherwise take from the local ids."""
    return part.run(num_classes=part.call.outputs[0].shape[-1])


def register() -> None:
    """Register this file's rules."""
    register_rule("aten.embedding", embedding, run_embedding)
    register_rule("aten.gather", gather)
    register_rule("aten.index_select", index_select)
    register_all("index.Tensor _unsafe_index.Tensor", index)
    register_all("scatter.src scatter.value scatter_add", scatter)
    register_all("index_add index_copy index_fill", index_written)
    register_all("index_put _unsafe_index_put", index_put)
    register_rule("aten.one_hot", leading(0, linear=False), run_one_hot)
