"""Layer, RMS, group, instance and batch norm."""

from __future__ import annotations

from typing import Any

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, place
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all

LAYERS = "layer_norm native_layer_norm rms_norm _fused_rms_norm"
BATCHES = """
    batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training
"""
STATISTICS = ("running_mean", "running_var")


def over_last(call: OpCall) -> list[OpPlacements]:
    """Layer and RMS norm: shard a dimension before the normalised dimensions; weight and bias are partial_grad."""
    leading = range(len(call.inputs[0].shape) - len(arguments(call)["normalized_shape"]))
    rest = (None,) * (len(call.inputs) - 1)
    return cut(call, [Axis((dim, *rest), (dim,) * len(call.outputs)) for dim in leading])


def over_groups(call: OpCall) -> list[OpPlacements]:
    """Group and instance norm: shard the batch."""
    if arguments(call).get("use_input_stats", True) and any(name in arguments(call) for name in STATISTICS):
        whole = [place(arguments(call)[name]) for name in STATISTICS]
        if whole != [None, None]:
            return []  # running statistics need the whole batch
    rest = (None,) * (len(call.inputs) - 1)
    return cut(call, [Axis((0, *rest), (0,) * len(call.outputs))])


def run_native_group_norm(part: Part) -> Any:
    """Normalise the local samples."""
    return part.run(N=part.inputs[0].shape[0])


def over_batch(call: OpCall) -> list[OpPlacements]:
    """Batch norm: shard the channels; with given statistics, any dimension."""
    named = arguments(call)
    channels = Axis((1, *(0 for _ in call.inputs[1:])), _outputs(call, 1, 0), REPLICATE)
    fixed = "no_training" in call.name or (not named["training"] and place(named.get("running_mean")) is not None)
    rest = (None,) * (len(call.inputs) - 1)
    dims = [dim for dim in range(len(call.inputs[0].shape)) if dim != 1 and fixed and _without_statistics(call)]
    others = [Axis((dim, *rest), _outputs(call, dim, None), REPLICATE) for dim in dims]
    without_gradient = [index for name in STATISTICS if (index := place(named.get(name))) is not None]
    return cut(call, [channels, *others], without_gradient)


def _outputs(call: OpCall, dim: int, of_statistics: int | None) -> tuple[int | None, ...]:
    """Return an axis's dimension of each output: the normalised tensor, then the statistics, which may be empty."""
    return (dim, *(None if meta.shape == (0,) else of_statistics for meta in call.outputs[1:]))


def _without_statistics(call: OpCall) -> bool:
    return all(meta.shape == (0,) for meta in call.outputs[1:])


def register() -> None:
    """Register this file's rules."""
    register_all(LAYERS, over_last)
    register_all("group_norm instance_norm", over_groups)
    register_all("native_group_norm", over_groups, run_native_group_norm)
    register_all(BATCHES, over_batch)
