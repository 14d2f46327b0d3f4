"""Cross-entropy, also of logits sharded along the classes, and elementwise losses, with their sums and means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, SUM, Layout, largest_local_shape, shard
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, is_float, place, sum_dtype
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Reduction, register_all, register_rule

CLASSES = 1  # the dimension of the logits


def over_classes(call: OpCall) -> list[OpPlacements]:
    """Logits [N, C, ...] sharded along C, targets [N, ...] and loss whole; not with class weights or probabilities."""
    logits = call.inputs[0]
    by_number = len(call.inputs) == 2 and not is_float(call.inputs[1])
    if not by_number or len(logits.shape) < 2 or logits.shape[CLASSES] < 2:
        return []
    return [OpPlacements((shard(CLASSES), REPLICATE), (REPLICATE,))]


def reductions(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return the all-reduces of sharded classes per mesh dimension: a max, then 2 sums per sample, 3 with smoothing."""
    dims = _dims(layouts[0], mesh_shape)
    if not dims:
        return []
    rows = tuple(REPLICATE if placement == shard(CLASSES) else placement for placement in layouts[0])
    shape = list(largest_local_shape(call.inputs[0].shape, rows, mesh_shape))
    del shape[CLASSES]
    nbytes = prod(shape) * sum_dtype(call.inputs[0].dtype).itemsize
    sums = 3 if arguments(call)["label_smoothing"] else 2
    return [Reduction(dim, nbytes, "max") for dim in dims] + [Reduction(dim, sums * nbytes, "sum") for dim in dims]


def run_over_classes(part: Part) -> torch.Tensor:
    """Return this rank's part of the loss."""
    named = arguments(part.call)
    logits, target = part.inputs
    own = part.input_bounds(0)
    reduction = int(named["reduction"])
    if reduction == MEAN:  # a mean reads the whole targets
        target = _local_target(part, target)
    classes, ignored = part.call.inputs[0].shape[CLASSES], int(named["ignore_index"])
    torch._assert_async(
        ((target == ignored) | ((target >= 0) & (target < classes))).all(), "a target is beyond the classes"
    )
    smoothing = float(named["label_smoothing"])
    classes_part = _ShardedClasses(
        part, own[CLASSES][0], classes, ignored, smoothing, _dims(part.input_layouts[0], part.mesh_shape)
    )
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, classes_part)  # type: ignore[no-untyped-call]
    if reduction:
        losses = losses.sum() / (_count(part, part.inputs[1]) if reduction == MEAN else 1)
    return losses.to(part.call.outputs[0].dtype)


@dataclass(frozen=True)
class _ShardedClasses:
    """This rank's classes, from `start`, of `classes` in all; `dims`: the mesh dimensions that shard the classes."""

    part: Part
    start: int
    classes: int
    ignored: int
    smoothing: float
    dims: list[int]

    def over_ranks(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        for dim in self.dims:
            tensor = self.part.reduced(tensor, dim, op)
        return tensor

    def places(self, target: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the targets' indices among `count` local classes, [N, 1, ...], and if they are local, [N, ...]."""
        own = (target >= self.start) & (target < self.start + count)
        return (target - self.start).masked_fill(~own, 0).unsqueeze(CLASSES), own


class _CrossEntropy(torch.autograd.Function):
    """loss [N, ...] = cross_entropy(logits [N, C / R, ...], targets [N, ...]), in fp32 at least, without a gather.

    Per sample, each rank computes the largest local logit, the local sum of exp(logit - largest of all ranks), and the
    target's logit, or 0 if another rank has it. A max and a sum over the ranks give the loss (as Megatron-core's
    vocab_parallel_cross_entropy: Shoeybi et al. 2019, arXiv:1909.08053, section 3). Backward needs no communication:
    the gradient is softmax - 1 at the target, softmax elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, classes_part: _ShardedClasses) -> torch.Tensor:
        x = logits.to(sum_dtype(logits.dtype))
        largest = classes_part.over_ranks(x.amax(CLASSES), "max")
        places, own = classes_part.places(target, x.shape[CLASSES])
        sums = [(x - largest.unsqueeze(CLASSES)).exp_().sum(CLASSES)]
        sums.append(x.gather(CLASSES, places).squeeze(CLASSES).masked_fill(~own, 0))
        if classes_part.smoothing:
            sums.append(x.sum(CLASSES))
        totals = classes_part.over_ranks(torch.stack(sums), "sum")
        log_sum = largest + totals[0].log()
        losses = log_sum - totals[1]
        if classes_part.smoothing:
            even = log_sum - totals[2] / classes_part.classes
            losses = (1 - classes_part.smoothing) * losses + classes_part.smoothing * even
        ctx.classes_part = classes_part
        ctx.save_for_backward(logits, target, log_sum)
        return losses.masked_fill(target == classes_part.ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        classes_part: _ShardedClasses = ctx.classes_part
        logits, target, log_sum = ctx.saved_tensors
        x_gradient = (logits.to(log_sum.dtype) - log_sum.unsqueeze(CLASSES)).exp_()
        x_gradient -= classes_part.smoothing / classes_part.classes
        places, own = classes_part.places(target, logits.shape[CLASSES])
        x_gradient.scatter_add_(
            CLASSES, places, (classes_part.smoothing - 1) * own.unsqueeze(CLASSES).to(x_gradient.dtype)
        )
        x_gradient *= gradient.masked_fill(target == classes_part.ignored, 0).unsqueeze(CLASSES)
        return x_gradient.to(logits.dtype), None, None


def _dims(layout: Layout, mesh_shape: Sequence[int]) -> list[int]:
    """Return the mesh dimensions of size > 1 that shard the classes."""
    pairs = zip(layout, mesh_shape, strict=True)
    return [dim for dim, (placement, size) in enumerate(pairs) if placement == shard(CLASSES) and size > 1]


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
    samples_sharded = any(placement.kind == "shard" for placement in part.input_layouts[0])
    if named["reduction"] != MEAN or is_float(part.call.inputs[index]) or not samples_sharded:
        return part.run()
    return part.run(target=_local_target(part, target), reduction=TOTAL) / _count(part, target)


def _local_target(part: Part, target: torch.Tensor) -> torch.Tensor:
    """Return the targets of this rank's logits among the whole targets."""
    return target[tuple(slice(*bound) for dim, bound in enumerate(part.input_bounds(0)) if dim != CLASSES)]


def cross_entropy(call: OpCall) -> list[OpPlacements]:
    """Shard all but C as `by_class` does, or shard the classes C."""
    return by_class(call) + over_classes(call)


def run_cross_entropy(part: Part) -> Any:
    """Run `run_by_class`; with sharded classes, run the loss with collectives over the classes."""
    return run_over_classes(part) if shard(CLASSES) in part.input_layouts[0] else run_by_class(part)


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
    register_rule("aten.cross_entropy_loss", cross_entropy, run_cross_entropy, reductions)
