"""Cross-entropy and elementwise losses, with their sums and means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import AVERAGE, SUM, Layout, bounds
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, is_float, place
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Reduction, register_all, register_rule
from ascend_parallel.sharding.rules.vocabulary import cuts_classes, over_classes, reductions, run_over_classes

NONE, MEAN, TOTAL = 0, 1, 2  # ATen's numbers for `reduction`
REDUCED = {NONE: None, MEAN: AVERAGE, TOTAL: SUM}
BY_ELEMENT = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss
"""
BY_CLASS = "nll_loss nll_loss_nd nll_loss2d"


def by_element(call: OpCall) -> list[OpPlacements]:
    """Shard any dimension of the broadcast inputs; a sum gives partial sums, a mean gives partial averages."""
    reduced = REDUCED[int(arguments(call)["reduction"])]
    dims = max(len(meta.shape) for meta in call.inputs)
    shapes = [(1,) * (dims - len(meta.shape)) + meta.shape for meta in call.inputs]
    axes = []
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        own = [dim - dims + len(meta.shape) for meta in call.inputs]
        inputs = (axis if size == max(sizes) else None for axis, size in zip(own, sizes, strict=True))
        axes.append(Axis(tuple(inputs), (None if reduced else dim,), reduced))
    return cut(call, axes)


def by_class(call: OpCall) -> list[OpPlacements]:
    """Logits [N, C, ...], targets [N, ...] (class numbers) or [N, C, ...] (probabilities), weight [C]: shard all but C.

    With class numbers, the mean divides by the count of targets other than `ignore_index`, weighted by class. That
    count differs from rank to rank. So each rank reads the whole targets, which are small, divides its local sum by the
    whole count, and returns a partial sum. With probabilities the result is a partial average.
    """
    named, dims = arguments(call), len(call.inputs[0].shape)
    target, weight = place(named["target"]), place(named.get("weight"))
    assert target is not None
    reduction, by_number = int(named["reduction"]), not is_float(call.inputs[target])
    if dims == 1 or (weight is not None and by_number and named.get("label_smoothing")):
        return []  # a single sample, or a weight with a gradient through only some of its uses
    reduced = SUM if reduction == MEAN and by_number else REDUCED[reduction]
    axes = []
    for dim in (axis for axis in range(dims) if axis != 1):
        own = dim - (dim > 1)  # without C
        of_target = (None if reduction == MEAN else own) if by_number else dim
        inputs = [dim if index == 0 else of_target if index == target else None for index in range(len(call.inputs))]
        axes.append(Axis(tuple(inputs), (None if reduced else own,), reduced))
    return cut(call, axes, [weight] if weight is not None and by_number else [])


def run_by_class(part: Part) -> Any:
    """Divide the sum over this rank's targets by the count of all targets."""
    named = arguments(part.call)
    index = place(named["target"])
    assert index is not None
    target = part.inputs[index]
    if named["reduction"] != MEAN or is_float(part.call.inputs[index]) or not _has_part(part):
        return part.run()
    shape, layout = part.call.inputs[0].shape, part.input_layouts[0]
    own = bounds(shape, layout, part.mesh_shape, part.coordinate)
    local_target = target[tuple(slice(*bound) for dim, bound in enumerate(own) if dim != 1)]
    return part.run(target=local_target, reduction=TOTAL) / _count(part, target)


def cross_entropy(call: OpCall) -> list[OpPlacements]:
    """Shard all but C as `by_class` does, or shard the classes C."""
    return by_class(call) + over_classes(call)


def run_cross_entropy(part: Part) -> Any:
    """Run `run_by_class`; with sharded classes, run the loss with collectives over the classes."""
    if not cuts_classes(part.input_layouts):
        return run_by_class(part)
    return run_over_classes(part, lambda: _count(part, part.inputs[1]))


def cross_entropy_reductions(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return the all-reduces that sharded classes need."""
    return reductions(call, layouts, mesh_shape) if cuts_classes(layouts) else []


def _has_part(part: Part) -> bool:
    """Tell whether the samples are sharded."""
    return any(placement.kind == "shard" for placement in part.input_layouts[0])


def _count(part: Part, target: torch.Tensor) -> torch.Tensor:
    """Return the divisor of the mean over all targets."""
    named = arguments(part.call)
    counted = target != named["ignore_index"]
    weight = place(named.get("weight"))
    if weight is None:
        return torch.sum(counted)
    weights = part.inputs[weight].detach()[target.masked_fill(~counted, 0)]
    return torch.sum(weights * counted)


def register() -> None:
    """Register this file's rules."""
    register_all(BY_ELEMENT, by_element)
    register_all(BY_CLASS, by_class, run_by_class)
    register_rule("aten.cross_entropy_loss", cross_entropy, run_cross_entropy, cross_entropy_reductions)
