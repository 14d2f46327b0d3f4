"""Operators along dimensions: sums, means, softmax, extremes, sorting; pooling."""

from __future__ import annotations

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import AVERAGE, SUM, Placement
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, linear_in_all, normal
from ascend_parallel.sharding.rules.registry import OpPlacements, Rule, register_all

NONLINEAR = """
    amax amin max.default max.dim min.default min.dim argmax argmin any all prod var std var_mean std_mean softmax
    _softmax _safe_softmax log_softmax _log_softmax logsumexp linalg_vector_norm norm topk sort argsort cumprod
    median.dim kthvalue mode count_nonzero glu logcumsumexp cummax cummin aminmax
"""
# By their number of spatial dimensions.
AVERAGES = {
    1: "adaptive_avg_pool1d avg_pool1d upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "adaptive_avg_pool2d _adaptive_avg_pool2d avg_pool2d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_bilinear2d upsample_bicubic2d",
    3: "adaptive_avg_pool3d _adaptive_avg_pool3d avg_pool3d upsample_nearest3d _upsample_nearest_exact3d "
    "upsample_trilinear3d",
}
EXTREMES = {dims: f"max_pool{dims}d max_pool{dims}d_with_indices adaptive_max_pool{dims}d" for dims in (1, 2, 3)}


def worked_along(call: OpCall) -> set[int]:
    """Return the dimensions of the input that an operator works along."""
    dims = len(call.inputs[0].shape)
    named = arguments(call)
    given = named.get("dim")
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return set(range(dims))
    return {normal(dim, dims) for dim in (given if isinstance(given, (list, tuple)) else [given])}


def axes_of(call: OpCall, reduced: Placement | None = None) -> list[Axis]:
    """Return the axes of an operator along dimensions: those others, and with `reduced` those that it adds up."""
    before, after = len(call.inputs[0].shape), len(call.outputs[0].shape)
    along = worked_along(call)
    found = []
    for dim in range(before):
        if dim not in along:
            out = dim if after == before else dim - sum(one < dim for one in along)
            found.append(Axis((dim,), (out,) * len(call.outputs)))
        elif reduced is not None:
            found.append(Axis((dim,), (None,) * len(call.outputs), reduced))
    return found


def along(call: OpCall) -> list[OpPlacements]:
    """Cut the dimensions that the operator does not work along."""
    return cut(call, axes_of(call))


def summed(call: OpCall) -> list[OpPlacements]:
    """Sum: cut any dimension, a summed one gives partial sums."""
    return cut(call, axes_of(call, SUM)) + linear_in_all(call)


def averaged(call: OpCall) -> list[OpPlacements]:
    """Mean: cut any dimension, an averaged one (in even pieces) gives partial averages."""
    return cut(call, axes_of(call, AVERAGE)) + linear_in_all(call)


def accumulated(call: OpCall) -> list[OpPlacements]:
    """Cumulative sum: linear."""
    return along(call) + linear_in_all(call)


def spatial(dims: int, linear: bool) -> Rule:
    """Return the rule of an operator over the last `dims` dimensions, one sample and channel at a time."""

    def rule(call: OpCall) -> list[OpPlacements]:
        leading = range(len(call.inputs[0].shape) - dims)
        own = [Axis((dim,), (dim,) * len(call.outputs)) for dim in leading]
        return cut(call, own) + (linear_in_all(call) if linear else [])

    return rule


def register() -> None:
    """Register this file's rules."""
    register_all(NONLINEAR, along)
    register_all("sum", summed)
    register_all("mean", averaged)
    register_all("cumsum", accumulated)
    for dims in (1, 2, 3):
        register_all(AVERAGES[dims], spatial(dims, linear=True))
        register_all(EXTREMES[dims], spatial(dims, linear=False))
