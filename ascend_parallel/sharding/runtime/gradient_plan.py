"""Plans which parameter gradients are all-reduced, over which mesh dimensions, and in which buckets.

A replicated parameter that a node reads as R* (layout.py) has a gradient that is a partial sum. The plan makes the
parameter itself R*: autograd then delivers this rank's term to the parameter, and the terms of many parameters are
all-reduced as one tensor (gradient_reduction.py). Planning runs no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ascend_parallel.sharding.bucketing import FIRST_BYTES, form_buckets
from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout, Placement, local_size
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class SummedGradient:
    """A parameter that is replicated on some mesh dimensions.

    dims
        The mesh dimensions over which its gradient must be summed.
    full_dims
        The mesh dimensions on which every rank computes the full gradient.
    nbytes
        Bytes of the gradient that a rank holds.
    """

    value: Value
    name: str
    dims: tuple[int, ...]
    full_dims: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are all-reduced as one tensor, over the same mesh dimensions."""

    members: tuple[SummedGradient, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The mesh dimensions over which the bucket is all-reduced, in the order of the all-reduces."""
        return self.members[0].dims

    @property
    def nbytes(self) -> int:
        """The bucket's bytes on a rank."""
        return sum(member.nbytes for member in self.members)


def with_partial_grads(fused_plan: FusedPlan, plan: ShardingPlan) -> tuple[FusedPlan, tuple[SummedGradient, ...]]:
    """Return the fused plan with R* for parameters of partial gradients, and those replicated on some mesh dimension.

    The parameters are in the order in which a forward reads them first.
    """
    layouts, shared, found = dict(fused_plan.layouts), dict(fused_plan.shared_layouts), {}
    for value, targets in _read_layouts(fused_plan, plan).items():
        dims: list[int] = []
        full_dims: list[int] = []
        for dim, size in enumerate(plan.mesh.shape):
            if size > 1 and layouts[value][dim] == REPLICATE:
                (dims if any(target[dim] == PARTIAL_GRAD for target in targets) else full_dims).append(dim)
        meta, node = plan.graph.meta(value), plan.graph.nodes[value.node]
        nbytes = local_size(meta.shape, layouts[value], plan.mesh.shape) * meta.dtype.itemsize
        if dims or full_dims:
            found[value] = SummedGradient(value, node.source, tuple(dims), tuple(full_dims), meta.dtype, nbytes)
        layouts[value] = _partial_grad_on(layouts[value], dims)
        if value in shared:
            shared[value] = _partial_grad_on(shared[value], dims)
    return replace(fused_plan, layouts=layouts, shared_layouts=shared), tuple(found.values())


def _partial_grad_on(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return the layout with R* for R on these mesh dimensions."""

    def changed(dim: int, placement: Placement) -> Placement:
        return PARTIAL_GRAD if dim in dims and placement == REPLICATE else placement

    return tuple(changed(dim, placement) for dim, placement in enumerate(layout))


def _read_layouts(fused_plan: FusedPlan, plan: ShardingPlan) -> dict[Value, list[Layout]]:
    """Return the layouts in which each parameter is read; parameters in the order of their first readers."""
    found: dict[Value, list[Layout]] = {}

    def read(value: Value, layout: Layout) -> None:
        if plan.graph.nodes[value.node].kind == PARAMETER and value in plan.differentiable:
            shared = fused_plan.shared_layouts.get(value)
            found.setdefault(value, []).append(layout if shared is None else _effective(shared, layout))

    for name in (name for unit in fused_plan.units(plan.graph) for name in unit):
        for value, layout in zip(plan.graph.nodes[name].inputs, fused_plan.inputs[name], strict=True):
            read(value, layout)
    for value in plan.graph.returned:
        read(value, plan.returned_layout(value))
    return found


def _effective(shared: Layout, layout: Layout) -> Layout:
    """Return the shared layout, with the reader's own placement where the shared layout is R."""
    return tuple(mine if common == REPLICATE else common for common, mine in zip(shared, layout, strict=True))


def buckets(summed: Sequence[SummedGradient], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which backward fills them: the parameter that is read last comes first.

    The parameters of a bucket have the same dtype and mesh dimensions; the first bucket of these is smaller.
    """
    params = [param for param in reversed(summed) if param.dims]
    formed = form_buckets((((param.dims, param.dtype), param.nbytes) for param in params), bucket_bytes, FIRST_BYTES)
    return tuple(Bucket(tuple(params[index] for index in indices)) for indices in formed)
