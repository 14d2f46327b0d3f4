"""Operators that read or write rows or elements by index: embedding, gather, index_select, x[ids], scatter, one_hot."""

from __future__ import annotations

from typing import Any

import torch

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import SUM
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, linear_in, normal, place, same
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all, register_rule


def embedding(call: OpCall) -> list[OpPlacements]:
    """weight [V, H], ids [...]: cut the ids, H, or the vocabulary V (partial sums: each id is one rank's)."""
    ids = len(call.inputs[1].shape)
    columns = Axis((1, None), (ids,))
    if arguments(call)["scale_grad_by_freq"]:
        return cut(call, [columns])  # frequencies are those of all ids
    return cut(call, [*(Axis((None, dim), (dim,)) for dim in range(ids)), columns, Axis((0, None), (None,), SUM)])


def run_embedding(part: Part) -> Any:
    """Look up the ids that are in this rank's rows, and give zeros for the others."""
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
    """Cut other dimensions where tensor and index are of one size, or the index along the dimension itself."""
    tensor, index = call.inputs[0].shape, call.inputs[1].shape
    if not tensor:
        return []
    dim = normal(arguments(call)["dim"], len(tensor))
    axes = [Axis((one, one), (one,)) for one in range(len(tensor)) if one != dim and tensor[one] == index[one]]
    return cut(call, [*axes, Axis((None, dim), (dim,))]) + linear_in(call, [0])


def index_select(call: OpCall) -> list[OpPlacements]:
    """Cut other dimensions, or the ids."""
    dims = len(call.inputs[0].shape)
    dim = normal(arguments(call)["dim"], dims)
    axes = [Axis((one, None), (one,)) for one in range(dims) if one != dim]
    return cut(call, [*axes, Axis((None, 0), (dim,))] if call.inputs[1].shape else axes) + linear_in(call, [0])


def index(call: OpCall) -> list[OpPlacements]:
    """x[ids, ...]: cut dimensions that are not looked up, or those of the ids, which are broadcast together."""
    dims, shape = len(call.inputs[0].shape), call.outputs[0].shape
    given = list(arguments(call)["indices"])
    looked = [dim for dim, one in enumerate(given) if one is not None]
    ids = [place(one) for one in given if one is not None]
    boolean = any(call.inputs[one].dtype in (torch.bool, torch.uint8) for one in ids if one is not None)
    if boolean or None in ids or looked != list(range(looked[0], looked[0] + len(looked))):
        return []  # as many elements as are true; or ids that go to the front
    width = len(shape) - (dims - len(looked))  # dimensions of the ids
    axes = []
    for dim in range(dims):
        if dim not in looked:
            out = dim if dim < looked[0] else dim - len(looked) + width
            axes.append(Axis((dim, *(None for _ in ids)), (out,)))
    for one in range(width):
        axes.append(_ids_axis(call, one, width, looked[0] + one))
    return cut(call, axes) + linear_in(call, [0])


def _ids_axis(call: OpCall, dim: int, width: int, out: int) -> Axis:
    size = call.outputs[0].shape[out]
    own = [dim - width + len(meta.shape) for meta in call.inputs[1:]]
    pairs = zip(call.inputs[1:], own, strict=True)
    return Axis((None, *(one if one >= 0 and meta.shape[one] == size else None for meta, one in pairs)), (out,))


def scatter(call: OpCall) -> list[OpPlacements]:
    """Cut dimensions other than the one written along, where tensor, index and source are of one size."""
    named, shape = arguments(call), call.inputs[0].shape
    if not shape:
        return []
    dim = normal(named["dim"], len(shape))
    others = [one for one in range(len(shape)) if one != dim and len({meta.shape[one] for meta in call.inputs}) == 1]
    linear = "add" in call.name or place(named.get("src")) is not None
    return cut(call, same(call, others)) + (linear_in(call, [0, 2]) if linear and "reduce" not in named else [])


def index_written(call: OpCall) -> list[OpPlacements]:
    """index_add, index_copy, index_fill: cut dimensions other than the one written along; the ids are whole."""
    dims, named = len(call.inputs[0].shape), arguments(call)
    if not dims:
        return []
    dim = normal(named["dim"], dims)
    own = [
        Axis(
            tuple(
                one if len(meta.shape) == dims and index != place(named["index"]) else None
                for index, meta in enumerate(call.inputs)
            ),
            (one,),
        )
        for one in range(dims)
        if one != dim
    ]
    return cut(call, own) + (linear_in(call, [0, 2]) if place(named.get("source")) is not None else [])


def index_put(call: OpCall) -> list[OpPlacements]:
    """x[ids, ...] = values: cut dimensions that are not looked up."""
    named, shape = arguments(call), call.inputs[0].shape
    given = list(named["indices"])
    looked = [dim for dim, one in enumerate(given) if one is not None]
    ids, values = [place(one) for one in given if one is not None], place(named["values"])
    boolean = any(call.inputs[one].dtype in (torch.bool, torch.uint8) for one in ids if one is not None)
    if boolean or None in ids or values is None or looked != list(range(looked[0], looked[0] + len(looked))):
        return []  # as many elements as are true; or ids that go to the front
    width = max(len(call.inputs[one].shape) for one in ids if one is not None)
    dims, meta = len(shape) - len(looked) + width, call.inputs[values]
    axes = []
    for dim in (one for one in range(len(shape)) if one not in looked):
        own = (dim if dim < looked[0] else dim - len(looked) + width) - dims + len(meta.shape)
        of_values = own if own >= 0 and meta.shape[own] == shape[dim] else None
        axes.append(Axis((dim, *(None for _ in ids), of_values), (dim,)))
    return cut(call, axes)


def one_hot(call: OpCall) -> list[OpPlacements]:
    """Cut the ids."""
    return cut(call, [Axis((dim,), (dim,)) for dim in range(len(call.inputs[0].shape))])


def run_one_hot(part: Part) -> Any:
    """Give the number of classes of the whole, where it was to be found from the ids."""
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
    register_rule("aten.one_hot", one_hot, run_one_hot)
