"""Elementwise operators with broadcasting; dropout and other random elementwise operators."""

from __future__ import annotations

from typing import Any

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import AVERAGE, SUM
from ascend_parallel.sharding.rules.axes import aligned, arguments, cut, linear_in, linear_in_all, place
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all

NAMES = """
    abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift ceil celu clamp clamp_max clamp_min clip copysign cos cosh elu eq erf erfc
    erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac ge gelu greater gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le leaky_relu lerp less lgamma log log10 log1p
    log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt max.other maximum
    min.other minimum mish nan_to_num ne nextafter not_equal polar pow reciprocal relu relu6 remainder
    round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_expit sqrt square
    tan tanh threshold trunc xlogy zeros_like ones_like full_like empty_like __and__ __or__ __xor__
"""
UNARY_LINEAR = """
    alias clone contiguous detach imag lift_fresh lift_fresh_copy neg negative positive real to _to_copy type_as
    conj resolve_conj resolve_neg deg2rad rad2deg
"""
RANDOM = "dropout native_dropout alpha_dropout rrelu rand_like randn_like bernoulli"


def pointwise(call: OpCall) -> list[OpPlacements]:
    """Shard any dimension of the output; inputs broadcast along that dimension are partial_grad."""
    return cut(call, aligned(call))


def unary_linear(call: OpCall) -> list[OpPlacements]:
    """Operators linear in their first input; from any other input they take only the dtype."""
    return pointwise(call) + linear_in(call, [0], partials=(SUM, AVERAGE))


def added(call: OpCall) -> list[OpPlacements]:
    """x + y, x - y: partial if both are. A scalar would be added once per rank, which only an average allows."""
    both = all(place(arguments(call)[name]) is not None for name in ("self", "other"))
    return pointwise(call) + linear_in_all(call, partials=(SUM, AVERAGE) if both else (AVERAGE,))


def broadcast(call: OpCall) -> list[OpPlacements]:
    """broadcast_tensors: each tensor is expanded to the common shape."""
    return pointwise(call) + linear_in_all(call)


def multiplied(call: OpCall) -> list[OpPlacements]:
    """x * y: linear in each factor while the other is whole."""
    return pointwise(call) + linear_in(call, *([index] for index in range(len(call.inputs))), partials=(SUM, AVERAGE))


def divided(call: OpCall) -> list[OpPlacements]:
    """x / y: linear in x, if not rounded."""
    linear = arguments(call).get("rounding_mode") is None and place(arguments(call)["self"]) == 0
    return pointwise(call) + (linear_in(call, [0], partials=(SUM, AVERAGE)) if linear else [])


def chosen(call: OpCall) -> list[OpPlacements]:
    """where(condition, x, y): jointly linear in x and y."""
    named = arguments(call)
    tensors = [place(named.get(name)) for name in ("self", "other")]
    places = [index for index in tensors if index is not None]
    return pointwise(call) + (linear_in(call, places, partials=(SUM, AVERAGE)) if len(places) == len(tensors) else [])


def filled(call: OpCall) -> list[OpPlacements]:
    """masked_fill: linear if the value is 0."""
    value = arguments(call)["value"]
    linear = place(value) is None and value == 0
    return pointwise(call) + (linear_in(call, [0], partials=(SUM, AVERAGE)) if linear else [])


def run_copy(part: Part) -> Any:
    """Return `src` with the dtype and shape of `self`: aten.copy itself is not differentiable."""
    source = place(arguments(part.call)["src"])
    assert source is not None
    return part.inputs[source].to(part.call.outputs[0].dtype).expand(part.output_shape()).clone()


def register() -> None:
    """Register this file's rules."""
    register_all("copy", pointwise, run_copy)
    register_all(NAMES, pointwise)
    register_all(UNARY_LINEAR, unary_linear)
    register_all("add sub subtract", added)
    register_all("mul multiply", multiplied)
    register_all("broadcast_tensors", broadcast)
    register_all("div divide true_divide", divided)
    register_all("where", chosen)
    register_all("masked_fill", filled)
    register_all(RANDOM, pointwise)
