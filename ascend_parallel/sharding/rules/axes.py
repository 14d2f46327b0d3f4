"""What rules are written in: an operator's axes, and the partial sums that pass through it.

An axis is a loop of the operator: a dimension of some of its tensors. Cutting it between ranks gives

    shard     tensors that have it
    copy      inputs that have it not: each rank has only a part of the uses, so the gradient is a partial sum
    partial   outputs that have it not (a contraction), where the operator adds up or averages along it

Inputs that no gradient goes to (integers) are replicated in place of copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
        The dimension that it is of each tensor, or None.
    reduced
        The state of an output without it, when it is cut; None if it must not be cut for that.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    reduced: Placement | None = None


def arguments(call: OpCall) -> dict[str, Any]:
    """Return a call's arguments by name, defaults included."""
    schema: Any = getattr(call.target, "_schema")  # noqa: B009 - a callable, for the type checker
    found = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    found |= {one.name: value for one, value in zip(schema.arguments, call.args, strict=False)}
    return {**found, **call.kwargs}


def draws(call: OpCall) -> bool:
    """Tell whether a call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    named = arguments(call)
    return named.get("dropout_p", 1.0) != 0.0 and named.get("train", True) is not False


def place(argument: Any) -> int | None:
    """Return which of the call's inputs an argument is, or None."""
    return argument.index if isinstance(argument, Ref) else None


def is_float(meta: TensorMeta) -> bool:
    """Tell whether a tensor can have a gradient."""
    return meta.dtype.is_floating_point or meta.dtype.is_complex


def normal(dim: int, dims: int) -> int:
    """Return a dimension counted from 0."""
    return dim + dims if dim < 0 else dim


def everywhere(call: OpCall, state: Placement) -> OpPlacements:
    """Return the strategy in which every tensor is whole on every rank: `state` is replicate or copy."""

    def states(metas: Sequence[TensorMeta]) -> tuple[Placement, ...]:
        return tuple(state if is_float(meta) else REPLICATE for meta in metas)

    return OpPlacements(states(call.inputs), states(call.outputs))


def cut(call: OpCall, axes: Iterable[Axis], without_gradient: Collection[int] = ()) -> list[OpPlacements]:
    """Return the strategies that cut one axis.

    without_gradient: places of floating-point inputs that the operator gives no gradient.
    """
    return [_cut(call, axis, without_gradient) for axis in axes if _can_be_cut(call, axis)]


def _can_be_cut(call: OpCall, axis: Axis) -> bool:
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
    return OpPlacements(tuple(inputs), tuple(state for state in outputs if state is not None))


def linear_in(call: OpCall, *groups: Iterable[int], states: Sequence[Placement] = (SUM,)) -> list[OpPlacements]:
    """Return the strategies in which partial tensors pass through a linear operator.

    groups: places of the inputs that are partial together, for the operator is linear in all of a group at once. A
    group with an integer input is left out.
    """
    found = []
    for group in map(set, groups):
        if (
            not group
            or not all(is_float(call.inputs[index]) for index in group)
            or not all(map(is_float, call.outputs))
        ):
            continue
        for state in states:
            others = everywhere(call, PARTIAL_GRAD).inputs
            inputs = tuple(state if index in group else other for index, other in enumerate(others))
            found.append(OpPlacements(inputs, (state,) * len(call.outputs)))
    return found


def linear_in_all(call: OpCall, states: Sequence[Placement] = (SUM, AVERAGE)) -> list[OpPlacements]:
    """Return the strategies of an operator that is linear in all its inputs at once: none if one is of integers.

    An integer cannot be a part of a sum, and whole it would be added once per rank.
    """
    return linear_in(call, range(len(call.inputs)), states=states)


def aligned(call: OpCall, dims: Iterable[int] | None = None) -> list[Axis]:
    """Return the dimensions of the (first) output as axes of inputs that are broadcast to it.

    dims: those dimensions of the output; None for all.
    """
    shape = call.outputs[0].shape

    def of(meta: TensorMeta, dim: int) -> int | None:
        own = dim - len(shape) + len(meta.shape)
        return own if own >= 0 and meta.shape[own] == shape[dim] else None

    return [
        Axis(tuple(of(meta, dim) for meta in call.inputs), tuple(of(meta, dim) for meta in call.outputs))
        for dim in (range(len(shape)) if dims is None else dims)
    ]


def same(call: OpCall, dims: Iterable[int]) -> list[Axis]:
    """Return axes that are the same dimension of every input and output."""
    return [Axis((dim,) * len(call.inputs), (dim,) * len(call.outputs)) for dim in dims]


def lettered(call: OpCall, inputs: Sequence[str], output: str) -> list[Axis]:
    """Return the axes of a product summed over the letters that the output lacks, as einsum writes it.

    A dimension of size 1 is broadcast where others of its letter are longer. A letter that a tensor has twice is no
    axis.
    """
    found = []
    for letter in dict.fromkeys("".join(inputs) + output):
        if any(one.count(letter) > 1 for one in (*inputs, output)):
            continue
        dims = [one.find(letter) for one in inputs]
        sizes = [meta.shape[dim] for meta, dim in zip(call.inputs, dims, strict=True) if dim >= 0]
        own = tuple(
            dim if dim >= 0 and meta.shape[dim] == max(sizes) else None
            for meta, dim in zip(call.inputs, dims, strict=True)
        )
        found.append(Axis(own, (output.find(letter) if letter in output else None,), SUM))
    return found
