"""Operators that reduce or sort along dimensions: sums, means, softmax, extremes; pooling; norms of each sample."""

from __future__ import annotations

from typing import Any

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import AVERAGE, SUM, Placement
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, linear_in_all, normal, place, same
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Rule, register_all

NONLINEAR = """
    amax amin max.default max.dim min.default min.dim argmax argmin any all prod var std var_mean std_mean softmax
    _softmax _safe_softmax log_softmax _log_softmax logsumexp linalg_vector_norm norm topk sort argsort cumprod
    median.dim kthvalue mode count_nonzero nanmean nansum glu logcumsumexp cummax cummin aminmax
"""
# By the number of spatial dimensions.
AVERAGES = {
    1: "adaptive_avg_pool1d avg_pool1d upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "adaptive_avg_pool2d _adaptive_avg_pool2d avg_pool2d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_bilinear2d upsample_bicubic2d",
    3: "adaptive_avg_pool3d _adaptive_avg_pool3d avg_pool3d upsample_nearest3d _upsample_nearest_exact3d "
    "upsample_trilinear3d",
}
EXTREMES = {dims: f"max_pool{dims}d max_pool{dims}d_with_indices adaptive_max_pool{dims}d" for dims in (1, 2, 3)}


def reduced_dims(call: OpCall) -> set[int]:
    """Return the dimensions of the input that an operator reduces or sorts: its argument `dim`."""
    dims = len(call.inputs[0].shape)
    dim = arguments(call).get("dim")
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return set(range(dims))
    return {normal(each, dims) for each in (dim if isinstance(dim, (list, tuple)) else [dim])}


def axes_of(call: OpCall, reduced: Placement | None = None) -> list[Axis]:
    """Return the axes outside of `reduced_dims`; with `reduced` also the reduced axes, with that output placement."""
    before, after = len(call.inputs[0].shape), len(call.outputs[0].shape)
    along = reduced_dims(call)
    axes = []
    for dim in range(before):
        if dim not in along:
            out = dim if after == before else dim - sum(removed < dim for removed in along)
            axes.append(Axis((dim,) * len(call.inputs), (out,) * len(call.outputs)))
        elif reduced is not None:
            axes.append(Axis((dim,) * len(call.inputs), (None,) * len(call.outputs), reduced))
    return axes


def along(call: OpCall) -> list[OpPlacements]:
    """Shard a dimension outside of `reduced_dims`."""
    return cut(call, axes_of(call))


def summed(call: OpCall) -> list[OpPlacements]:
    """Sum: shard any dimension; a summed dimension gives partial sums."""
    return cut(call, axes_of(call, SUM)) + linear_in_all(call)


def averaged(call: OpCall) -> list[OpPlacements]:
    """Mean: shard any dimension; an averaged dimension (in even slices) gives partial averages."""
    return cut(call, axes_of(call, AVERAGE)) + linear_in_all(call)


def accumulated(call: OpCall) -> list[OpPlacements]:
    """Cumulative sum, difference: `along`, and jointly linear in all tensors."""
    return along(call) + linear_in_all(call)


def leading(kept: int, linear: bool) -> Rule:
    """Return the rule of an operator over the last `kept` dimensions of its tensors: shard those before."""

    def rule(call: OpCall) -> list[OpPlacements]:
        shapes = [meta.shape for meta in (*call.inputs, *call.outputs)]
        dims = range(max(min(map(len, shapes)) - kept, 0))
        return cut(call, same(call, dims)) + (linear_in_all(call) if linear else [])

    return rule


LAYERS = "layer_norm native_layer_norm rms_norm _fused_rms_norm"
STATISTICS = ("running_mean", "running_var")


def over_last(call: OpCall) -> list[OpPlacements]:
    """Layer and RMS norm: shard a dimension before the normalised dimensions; weight and bias are partial_grad."""
    dims = range(len(call.inputs[0].shape) - len(arguments(call)["normalized_shape"]))
    return cut(call, same(call, dims, inputs=1))


def over_groups(call: OpCall) -> list[OpPlacements]:
    """Group and instance norm: shard the batch."""
    if arguments(call).get("use_input_stats", True) and any(name in arguments(call) for name in STATISTICS):
        whole = [place(arguments(call)[name]) for name in STATISTICS]
        if whole != [None, None]:
            return []  # running statistics need the whole batch
    return cut(call, same(call, [0], inputs=1))


def run_native_group_norm(part: Part) -> Any:
    """Normalise the local samples."""
    return part.run(N=part.inputs[0].shape[0])


def register() -> None:
    """Register this file's rules."""
    register_all(NONLINEAR, along)
    register_all("sum", summed)
    register_all("mean", averaged)
    register_all("cumsum diff", accumulated)
    for dims in (1, 2, 3):
        register_all(AVERAGES[dims], leading(dims, linear=True))
        register_all(EXTREMES[dims], leading(dims, linear=False))
    register_all(LAYERS, over_last)
    register_all("group_norm instance_norm", over_groups)
    register_all("native_group_norm", over_groups, run_native_group_norm)
