"""The helpers that rules are built from: an operator's axes, and the partial sums that pass through an operator.

An axis is a loop of the operator: a dimension of some of its tensors. Sharding an axis gives these placements:

    shard          tensors that have the axis
    partial_grad   inputs without the axis: each rank has only some of their uses, so the gradient is a partial sum
    partial        outputs without the axis (a contraction), where the operator sums or averages along it

Inputs without a gradient (integers) are replicate instead of partial_grad.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ascend_parallel.sharding.graph import OpCall, Ref, TensorMeta
from ascend_parallel.sharding.layout import AVERAGE, PARTIAL_GRAD, REPLICATE, SUM, Placement, shard
from ascend_parallel.sharding.rules.registry import OpPlacements


@dataclass(frozen=True)
class Axis:
    """A loop of an operator.

    inputs, outputs
        The dimension of each tensor that is this axis, or None.
    reduced
        The placement of outputs without the axis, when the axis is sharded; None if it then cannot be sharded.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    reduced: Placement | None = None


def arguments(call: OpCall) -> Mapping[str, Any]:
    """Return a call's arguments by name, defaults included."""
    return call.by_name


def draws(call: OpCall) -> bool:
    """Tell whether a call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    named = arguments(call)
    if named.get("dropout_p", 1.0) == 0.0 or named.get("keep_prob", 0.0) == 1.0:
        return False
    return named.get("train", True) is not False


def place(argument: Any) -> int | None:
    """Return the index of an argument among the call's inputs, or None if the argument is no tensor."""
    return argument.index if isinstance(argument, Ref) else None


def is_float(meta: TensorMeta) -> bool:
    """Tell whether a tensor can have a gradient."""
    return meta.dtype.is_floating_point or meta.dtype.is_complex


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are summed: fp32 at least."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def normal(dim: int, dims: int) -> int:
    """Return the dimension counted from 0, also for a negative `dim`."""
    return dim + dims if dim < 0 else dim


def everywhere(call: OpCall, placement: Placement) -> OpPlacements:
    """Return the strategy with every tensor whole on every rank: `placement` is replicate or partial_grad."""

    def placements(metas: Sequence[TensorMeta]) -> tuple[Placement, ...]:
        return tuple(placement if is_float(meta) else REPLICATE for meta in metas)

    return OpPlacements(placements(call.inputs), placements(call.outputs))


def cut(call: OpCall, axes: Iterable[Axis], without_gradient: Collection[int] = ()) -> list[OpPlacements]:
    """Return the strategies that shard a single axis, for each of `axes` that can be sharded.

    without_gradient: indices of floating-point inputs to which the operator computes no gradient.
    """
    return [_cut(call, axis, without_gradient) for axis in axes if _can_shard(call, axis)]


def _can_shard(call: OpCall, axis: Axis) -> bool:
    tensors = (*zip(call.inputs, axis.inputs, strict=True), *zip(call.outputs, axis.outputs, strict=True))
    sizes = [meta.shape[dim] for meta, dim in tensors if dim is not None]
    reduced = [meta for meta, dim in zip(call.outputs, axis.outputs, strict=True) if dim is None]
    adds_up = not reduced or axis.reduced == REPLICATE or (axis.reduced is not None and all(map(is_float, reduced)))
    return bool(sizes) and min(sizes) > 1 and adds_up


def _cut(call: OpCall, axis: Axis, without_gradient: Collection[int]) -> OpPlacements:
    def without(index: int, meta: TensorMeta) -> Placement:
        return PARTIAL_GRAD if is_float(meta) and index not in without_gradient else REPLICATE

    inputs = [
        without(index, meta) if dim is None else shard(dim)
        for index, (meta, dim) in enumerate(zip(call.inputs, axis.inputs, strict=True))
    ]
    outputs = [axis.reduced if dim is None else shard(dim) for dim in axis.outputs]
    return OpPlacements(tuple(inputs), tuple(placement for placement in outputs if placement is not None))


def linear_in(call: OpCall, *groups: Iterable[int], partials: Sequence[Placement] = (SUM,)) -> list[OpPlacements]:
    """Return the strategies in which partial tensors pass through a linear operator.

    groups: each lists inputs (by index) that are partial together, because the operator is jointly linear in them. A
    group with an integer input is skipped.
    """
    strategies = []
    for group in map(set, groups):
        if (
            not group
            or not all(is_float(call.inputs[index]) for index in group)
            or not all(map(is_float, call.outputs))
        ):
            continue
        for partial in partials:
            whole = everywhere(call, PARTIAL_GRAD).inputs
            inputs = tuple(partial if index in group else placement for index, placement in enumerate(whole))
            strategies.append(OpPlacements(inputs, (partial,) * len(call.outputs)))
    return strategies


def linear_in_all(call: OpCall, partials: Sequence[Placement] = (SUM, AVERAGE)) -> list[OpPlacements]:
    """Return the strategies of an operator that is jointly linear in all inputs: none if an input is of integers.

    An integer tensor cannot be a term of a sum, and a whole tensor would be added once per rank.
    """
    return linear_in(call, range(len(call.inputs)), partials=partials)


def aligned(call: OpCall, dims: Iterable[int] | None = None) -> list[Axis]:
    """Return dimensions of the first output as axes, for inputs that are broadcast to the output.

    dims: the dimensions of the output; None for all.
    """
    shape = call.outputs[0].shape

    def of(meta: TensorMeta, dim: int) -> int | None:
        own = dim - len(shape) + len(meta.shape)
        return own if own >= 0 and meta.shape[own] == shape[dim] else None

    return [
        Axis(tuple(of(meta, dim) for meta in call.inputs), tuple(of(meta, dim) for meta in call.outputs))
        for dim in (range(len(shape)) if dims is None else dims)
    ]


def same(call: OpCall, dims: Iterable[int], inputs: int | None = None) -> list[Axis]:
    """Return an axis for each of `dims`: the same dimension of every input and output.

    inputs: of that many inputs, the others stay whole; None: of all.
    """
    count = len(call.inputs) if inputs is None else inputs
    rest = (None,) * (len(call.inputs) - count)
    return [Axis((*(dim,) * count, *rest), (dim,) * len(call.outputs)) for dim in dims]


def other_dims(call: OpCall, *dims: int) -> list[int]:
    """Return the dimensions of the first input except `dims`, which may be negative."""
    count = len(call.inputs[0].shape)
    own = {normal(dim, count) for dim in dims}
    return [dim for dim in range(count) if dim not in own]


def lettered(call: OpCall, inputs: Sequence[str], output: str) -> list[Axis]:
    """Return the axes of an einsum: a letter that the output lacks is summed.

    A dimension of size 1 is broadcast where other dimensions of its letter are longer. A letter that a tensor has twice
    is no axis.
    """
    axes = []
    for letter in dict.fromkeys("".join(inputs) + output):
        if any(term.count(letter) > 1 for term in (*inputs, output)):
            continue
        dims = [term.find(letter) for term in inputs]
        sizes = [meta.shape[dim] for meta, dim in zip(call.inputs, dims, strict=True) if dim >= 0]
        own = tuple(
            dim if dim >= 0 and meta.shape[dim] == max(sizes) else None
            for meta, dim in zip(call.inputs, dims, strict=True)
        )
        axes.append(Axis(own, (output.find(letter) if letter in output else None,), SUM))
    return axes
