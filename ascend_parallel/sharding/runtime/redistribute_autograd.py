"""A rank's tensor from one layout to another, and its gradient back: the only door for a graph's collectives.

The tensor moves from `source` to `target`; the gradient, which a state places too (layout.py), from the target's
gradient placement to the source's. On one mesh dimension, where more than nothing happens:

    source     target     forward         backward
    replicate  copy       -               all-reduce
    copy       replicate  -               the first rank keeps it, zeros elsewhere
    replicate  shard      slice           all-gather
    copy       shard      slice           zeros around it
    shard      replicate  all-gather      slice
    shard      copy       all-gather      reduce-scatter
    shard(a)   shard(b)   all-to-all      all-to-all
    partial    replicate  all-reduce      -
    partial    copy       all-reduce      all-reduce
    partial    shard      reduce-scatter  all-gather
    replicate  partial    first keeps     -
    copy       partial    first keeps     first keeps
    shard      partial    zeros around    slice

An average is a sum of which every rank holds as many times its part as there are ranks, its gradient as many times
less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.layout import AVERAGE, SUM, Layout, Shape, backward, forward
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.redistribute_local import (
    RequestGenerator,
    finish_redistribute,
    redistribute_requests,
)
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep, Redistribution, plan_redistribution

Observer = Callable[[str, RedistributeStep], None]
"""Called with "forward" or "backward" and each step that communicates, when it starts."""


@dataclass(frozen=True)
class Ways:
    """Both directions of one conversion of a tensor whose whole is of `shape`; both multiply by `factor`."""

    shape: Shape
    mesh: ProcessMesh
    ahead: Redistribution
    back: Redistribution
    factor: float
    observer: Observer | None

    @property
    def nothing(self) -> bool:
        """Tell whether neither a tensor nor its gradient changes."""
        return not self.ahead.steps and not self.back.steps and self.factor == 1

    def going(self, local: torch.Tensor, direction: str) -> RequestGenerator:
        """Convert a tensor, or its gradient "backward", one collective at a time."""
        way = self.ahead if direction == "forward" else self.back
        scaled = local if self.factor == 1 else local * self.factor
        if not way.steps:
            return scaled.view_as(scaled)
        observer = None if self.observer is None else partial(self.observer, direction)
        moved = yield from redistribute_requests(scaled, self.shape, self.mesh, way, observer)
        return _compact(moved, scaled)


def convert(
    local: torch.Tensor,
    shape: Shape,
    mesh: ProcessMesh,
    source: Layout,
    target: Layout,
    costs: MeshCosts,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Return what this rank holds in layout `target` of the tensor of which it holds `local` in `source`.

    shape
        Of the whole tensor.
    costs
        What collectives cost: of several ways the cheapest is taken.

    Differentiable once; every rank of the mesh has to call it alike. `local` and gradients are not changed. Nothing
    is sent where nothing has to be. Raises `ValueError` if there are not as many states as mesh dimensions.
    """
    for layout in (source, target):
        if len(layout) != mesh.ndim:
            raise ValueError(f"a layout of {len(layout)} states on a mesh of {mesh.ndim} dimensions: give one for each")
    if source == target:
        return local
    ways = ways_between(tuple(shape), local.element_size(), mesh, source, target, costs, observer)
    if ways.nothing:
        return local
    converted: torch.Tensor = _Convert.apply(local, ways)  # type: ignore[no-untyped-call]
    return converted


def ways_between(
    shape: Shape,
    itemsize: int,
    mesh: ProcessMesh,
    source: Layout,
    target: Layout,
    costs: MeshCosts,
    observer: Observer | None = None,
) -> Ways:
    """Return how `convert` brings a tensor of that shape and bytes per element there, and its gradient back."""
    source, target, factor = _without_averages(source, target, tuple(mesh.shape))

    def planned(before: Layout, after: Layout) -> Redistribution:
        return plan_redistribution(shape, itemsize, tuple(mesh.shape), before, after, costs)

    ahead, back = planned(forward(source), forward(target)), planned(backward(target), backward(source))
    return Ways(shape, mesh, ahead, back, factor, observer)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, ways: Ways) -> torch.Tensor:
        ctx.ways = ways
        return finish_redistribute(ways.going(local, "forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ways: Ways = ctx.ways
        return finish_redistribute(ways.going(gradient.contiguous(), "backward")), None


def _without_averages(source: Layout, target: Layout, mesh_shape: Shape) -> tuple[Layout, Layout, float]:
    """Return the layouts with sums in place of averages, and what makes the local tensor a part of such a sum."""
    factor = 1.0
    for before, after, size in zip(source, target, mesh_shape, strict=True):
        factor = factor / size if before == AVERAGE else factor
        factor = factor * size if after == AVERAGE else factor
    sums = [tuple(SUM if state == AVERAGE else state for state in layout) for layout in (source, target)]
    return sums[0], sums[1], factor


def _compact(moved: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return a slice as a tensor of its own: as a view it would keep the whole in memory, and have its strides."""
    shared = moved.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    if shared and moved.numel() < before.numel():
        return moved.clone(memory_format=torch.contiguous_format)
    return moved.contiguous()
