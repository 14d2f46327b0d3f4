"""Cross-entropy of logits that are cut along the classes: nobody gathers them.

Each rank knows of a sample the largest of its logits, the sum of their exponentials over the largest of all, and, if it
has the target's, that logit; one maximum and one sum over the ranks of such numbers give the loss (as Megatron-core's
vocab_parallel_cross_entropy: Shoeybi et al. 2019, arXiv:1909.08053, section 3). Backward needs no communication: the
gradient is softmax less one at the target.
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
    """Logits [N, C, ...] cut along C, targets [N, ...] and loss whole; not with class weights or probabilities."""
    logits = call.inputs[0]
    by_number = len(call.inputs) == 2 and not is_float(call.inputs[1])
    if not by_number or len(logits.shape) < 2 or logits.shape[CLASSES] < 2:
        return []
    return [OpPlacements((shard(CLASSES), REPLICATE), (REPLICATE,))]


def cuts_classes(layouts: Sequence[Layout]) -> bool:
    """Tell whether the first input is cut along the classes."""
    return shard(CLASSES) in layouts[0]


def reductions(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return a maximum for each sample, and two sums, three with label smoothing."""
    rows = tuple(REPLICATE if state == shard(CLASSES) else state for state in layouts[0])
    shape = list(local_shape(call.inputs[0].shape, rows, tuple(mesh_shape), [0] * len(mesh_shape)))
    del shape[CLASSES]
    nbytes = prod(shape) * _computed_in(call.inputs[0].dtype).itemsize
    sums = 3 if arguments(call)["label_smoothing"] else 2
    dims = _dims(layouts[0], mesh_shape)
    return [Reduction(dim, nbytes, "max") for dim in dims] + [Reduction(dim, sums * nbytes, "sum") for dim in dims]


def run_over_classes(part: Part, count: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of the loss.

    count: what a mean divides by.
    """
    named = arguments(part.call)
    logits, target = part.inputs
    own = part.input_bounds(0)
    reduction = int(named["reduction"])
    if reduction == 1:  # the mean's targets are whole
        target = target[tuple(slice(*one) for dim, one in enumerate(own) if dim != CLASSES)]
    classes, ignored = part.call.inputs[0].shape[CLASSES], int(named["ignore_index"])
    torch._assert_async(
        ((target == ignored) | ((target >= 0) & (target < classes))).all(), "a target is beyond the classes"
    )
    smoothing = float(named["label_smoothing"])
    problem = _Problem(
        part, own[CLASSES][0], classes, ignored, smoothing, _dims(part.input_layouts[0], part.mesh_shape)
    )
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, problem)  # type: ignore[no-untyped-call]
    if reduction:
        losses = losses.sum() / (count() if reduction == 1 else 1)
    return losses.to(part.call.outputs[0].dtype)


@dataclass(frozen=True)
class _Problem:
    """`start`: the first of this rank's of `classes`; `dims`: the mesh dimensions that cut them."""

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
        """Return where the targets are among `count` own classes, [N, 1, ...], and [N, ...] whether they are."""
        own = (target >= self.start) & (target < self.start + count)
        return (target - self.start).masked_fill(~own, 0).unsqueeze(CLASSES), own


class _CrossEntropy(torch.autograd.Function):
    """Logits [N, C / R, ...] and targets [N, ...] to the loss of each sample, in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, problem: _Problem) -> torch.Tensor:
        x = logits.to(_computed_in(logits.dtype))
        largest = problem.over_ranks(x.amax(CLASSES), "max")
        places, own = problem.places(target, x.shape[CLASSES])
        sums = [(x - largest.unsqueeze(CLASSES)).exp_().sum(CLASSES)]
        sums.append(x.gather(CLASSES, places).squeeze(CLASSES).masked_fill(~own, 0))
        if problem.smoothing:
            sums.append(x.sum(CLASSES))
        totals = problem.over_ranks(torch.stack(sums), "sum")
        log_sum = largest + totals[0].log()
        losses = log_sum - totals[1]
        if problem.smoothing:
            even = log_sum - totals[2] / problem.classes
            losses = (1 - problem.smoothing) * losses + problem.smoothing * even
        ctx.problem = problem
        ctx.save_for_backward(logits, target, log_sum)
        return losses.masked_fill(target == problem.ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        problem: _Problem = ctx.problem
        logits, target, log_sum = ctx.saved_tensors
        x_gradient = (logits.to(log_sum.dtype) - log_sum.unsqueeze(CLASSES)).exp_()
        x_gradient -= problem.smoothing / problem.classes
        places, own = problem.places(target, logits.shape[CLASSES])
        x_gradient.scatter_add_(CLASSES, places, (problem.smoothing - 1) * own.unsqueeze(CLASSES).to(x_gradient.dtype))
        x_gradient *= gradient.masked_fill(target == problem.ignored, 0).unsqueeze(CLASSES)
        return x_gradient.to(logits.dtype), None, None


def _dims(layout: Layout, mesh_shape: Sequence[int]) -> list[int]:
    """Return the mesh dimensions that cut the classes, without those of one rank."""
    pairs = zip(layout, mesh_shape, strict=True)
    return [dim for dim, (state, size) in enumerate(pairs) if state == shard(CLASSES) and size > 1]


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
