"""Redistributes a rank's tensor in forward and its gradient in backward. All collectives of a graph run here.

Forward moves the tensor from `source` to `target`. Backward moves the gradient from the target's gradient placement to
the source's (layout.py: a placement also places the gradient; R* is a replicated tensor whose gradient is a partial
sum). On one mesh dimension, where R is replicate, S shard and P partial:

    source  target  forward           backward
    R       R*      -                 all-reduce
    R*      R       -                 first rank keeps it, zeros elsewhere
    R       S       slice             all-gather
    R*      S       slice             pad with zeros
    S       R       all-gather        slice
    S       R*      all-gather        reduce-scatter
    S(a)    S(b)    all-to-all        all-to-all
    P       R       all-reduce        -
    P       R*      all-reduce        all-reduce
    P       S       reduce-scatter    all-gather
    R       P       first rank keeps  -
    R*      P       first rank keeps  first rank keeps
    S       P       pad with zeros    slice

Averages over R ranks run as sums of local parts scaled by 1/R; the gradient is scaled by the same factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, SUM, Layout, Shape, backward, forward
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import all_reduce_step
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.redistribute_local import (
    MeshDimStep,
    RequestGenerator,
    finish_redistribute,
    lines_of,
    redistribute_local,
    redistribute_requests,
)
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep, Redistribution, plan_redistribution
from ascend_parallel.sharding.rules.local import AllReduce

Observer = Callable[[str, RedistributeStep], None]
"""Called with "forward" or "backward" and a step that communicates, when the step starts."""


@dataclass(frozen=True)
class DifferentiableRedistribution:
    """The forward and the backward of redistributing a tensor of global `shape`; both multiply by `factor`."""

    shape: Shape
    mesh: ProcessMesh
    forward: Redistribution
    backward: Redistribution
    factor: float
    observer: Observer | None

    @property
    def is_noop(self) -> bool:
        """Tell whether neither a tensor nor its gradient changes."""
        return not self.forward.steps and not self.backward.steps and self.factor == 1

    @property
    def communicates(self) -> bool:
        """Whether forward runs a collective."""
        return any(step.nbytes for step in self.forward.steps)

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """Return the redistributed tensor. Differentiable once; `local` and gradients are not changed."""
        converted: torch.Tensor = _Convert.apply(local, self)  # type: ignore[no-untyped-call]
        return converted

    def in_backward(self) -> DifferentiableRedistribution:
        """Return the same redistribution for a tensor that backward redistributes: it is counted there."""
        return replace(self, observer=None if self.observer is None else partial(_of_backward, self.observer))

    def steps(self, local: torch.Tensor, direction: str) -> RequestGenerator:
        """Redistribute a tensor ("forward") or its gradient ("backward"), one collective at a time."""
        scaled = local if self.factor == 1 else local * self.factor
        lines = self._forward_lines if direction == "forward" else self._backward_lines
        if not lines:
            return scaled.view_as(scaled)
        observer = None if self.observer is None else partial(self.observer, direction)
        moved = yield from redistribute_requests(scaled, lines, observer)
        return _compact(moved, scaled)

    @cached_property
    def _forward_lines(self) -> tuple[MeshDimStep, ...]:
        return lines_of(self.shape, self.mesh, self.forward)

    @cached_property
    def _backward_lines(self) -> tuple[MeshDimStep, ...]:
        return lines_of(self.shape, self.mesh, self.backward)


def convert(
    local: torch.Tensor,
    shape: Shape,
    mesh: ProcessMesh,
    source: Layout,
    target: Layout,
    costs: MeshCosts,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Return this rank's part of a tensor in layout `target`, given its part `local` in layout `source`.

    shape
        Shape of the global tensor.
    costs
        Costs of the collectives. The cheapest sequence of collectives is taken.

    The result is differentiable once. Every rank of the mesh must call this with the same layouts. `local` and
    gradients are not changed. Raises `ValueError` if a layout has not one placement per mesh dimension.
    """
    for layout in (source, target):
        if len(layout) != mesh.ndim:
            raise ValueError(f"{len(layout)} placements on a mesh of {mesh.ndim} dimensions: give as many placements")
    if source == target:
        return local
    plan = plan_differentiable(tuple(shape), local.element_size(), mesh, source, target, costs, observer)
    return local if plan.is_noop else plan(local)


def plan_differentiable(
    shape: Shape,
    itemsize: int,
    mesh: ProcessMesh,
    source: Layout,
    target: Layout,
    costs: MeshCosts,
    observer: Observer | None = None,
) -> DifferentiableRedistribution:
    """Return the collectives of `convert`, forward and backward, for a tensor of this shape and bytes per element."""
    source, target, factor = _without_averages(source, target, tuple(mesh.shape))

    def planned(before: Layout, after: Layout) -> Redistribution:
        return plan_redistribution(shape, itemsize, tuple(mesh.shape), before, after, costs)

    in_forward, in_backward = planned(forward(source), forward(target)), planned(backward(target), backward(source))
    return DifferentiableRedistribution(shape, mesh, in_forward, in_backward, factor, observer)


def _of_backward(observer: Observer, _direction: str, step: RedistributeStep) -> None:
    observer("backward", step)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: DifferentiableRedistribution) -> torch.Tensor:
        ctx.plan = plan
        return finish_redistribute(plan.steps(local, "forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        plan: DifferentiableRedistribution = ctx.plan
        return finish_redistribute(plan.steps(gradient.contiguous(), "backward")), None


def _without_averages(source: Layout, target: Layout, mesh_shape: Shape) -> tuple[Layout, Layout, float]:
    """Return the layouts with sums in place of averages, and the factor that scales a local part accordingly."""
    factor = 1.0
    for before, after, size in zip(source, target, mesh_shape, strict=True):
        factor = factor / size if before == AVERAGE else factor
        factor = factor * size if after == AVERAGE else factor
    sums = [tuple(SUM if placement == AVERAGE else placement for placement in layout) for layout in (source, target)]
    return sums[0], sums[1], factor


def _compact(moved: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Copy a slice to memory of its own: a view would keep the global tensor alive and keep its strides."""
    shared = moved.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    if shared and moved.numel() < before.numel():
        return moved.clone(memory_format=torch.contiguous_format)
    return moved.contiguous()


def all_reducer(mesh: ProcessMesh, costs: MeshCosts, observer: Observer) -> AllReduce:
    """Return the all-reduce that a rule's `run` calls: ``all_reduce(tensor, mesh_dim, op, direction)``."""
    whole = (REPLICATE,) * mesh.ndim

    def all_reduce(tensor: torch.Tensor, mesh_dim: int, op: str, direction: str = "forward") -> torch.Tensor:
        step = all_reduce_step(mesh_dim, tensor.numel() * tensor.element_size(), op, costs)
        observer(direction, step)
        source = (*whole[:mesh_dim], step.source, *whole[mesh_dim + 1 :])
        return redistribute_local(tensor, tensor.shape, mesh, Redistribution(source, whole, (step,)))

    return all_reduce
