"""Cross-entropy of logits sharded along the classes, without gathering them.

Per sample, each rank computes the largest local logit, the local sum of exp(logit - largest of all ranks), and the
target's logit, or 0 if another rank has it. A max and a sum over the ranks give the loss (as Megatron-core's
vocab_parallel_cross_entropy: Shoeybi et al. 2019, arXiv:1909.08053, section 3). Backward needs no communication: the
gradient is softmax - 1 at the target, softmax elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE, Layout, local_shape, shard
from ascend_parallel.sharding.rules.axes import arguments, is_float
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Reduction

CLASSES = 1  # the dimension of the logits


def over_classes(call: OpCall) -> list[OpPlacements]:
    """Logits [N, C, ...] sharded along C, targets [N, ...] and loss whole; not with class weights or probabilities."""
    logits = call.inputs[0]
    by_number = len(call.inputs) == 2 and not is_float(call.inputs[1])
    if not by_number or len(logits.shape) < 2 or logits.shape[CLASSES] < 2:
        return []
    return [OpPlacements((shard(CLASSES), REPLICATE), (REPLICATE,))]


def cuts_classes(layouts: Sequence[Layout]) -> bool:
    """Tell whether the first input is sharded along the classes."""
    return shard(CLASSES) in layouts[0]


def reductions(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return the all-reduces per mesh dimension: a max per sample, then 2 sums per sample, 3 with label smoothing."""
    rows = tuple(REPLICATE if placement == shard(CLASSES) else placement for placement in layouts[0])
    shape = list(local_shape(call.inputs[0].shape, rows, tuple(mesh_shape), [0] * len(mesh_shape)))
    del shape[CLASSES]
    nbytes = prod(shape) * _compute_dtype(call.inputs[0].dtype).itemsize
    sums = 3 if arguments(call)["label_smoothing"] else 2
    dims = _dims(layouts[0], mesh_shape)
    return [Reduction(dim, nbytes, "max") for dim in dims] + [Reduction(dim, sums * nbytes, "sum") for dim in dims]


def run_over_classes(part: Part, count: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of the loss.

    count: returns the divisor of a mean.
    """
    named = arguments(part.call)
    logits, target = part.inputs
    own = part.input_bounds(0)
    reduction = int(named["reduction"])
    if reduction == 1:  # a mean reads the whole targets
        target = target[tuple(slice(*bound) for dim, bound in enumerate(own) if dim != CLASSES)]
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
        losses = losses.sum() / (count() if reduction == 1 else 1)
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
    """loss [N, ...] = cross_entropy(logits [N, C / R, ...], targets [N, ...]), in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, classes_part: _ShardedClasses) -> torch.Tensor:
        x = logits.to(_compute_dtype(logits.dtype))
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


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
