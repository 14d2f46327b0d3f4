"""Redistributes DTensors, of any placements and meshes.

Gradients live on the mesh of the tensor:

    placement             gradient     local gradient
    Shard(dim)            Shard(dim)   this rank's slice
    Replicate             Replicate    the whole gradient
    Partial("sum")        Replicate    the whole gradient
    Partial("avg")        Replicate    the whole gradient / R
    Partial("max"/"min")  Replicate    the gradient where this rank has the extreme, divided among ties
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ascend_parallel.devices import device_type
from ascend_parallel.sharding.layout import SUM, Layout
from ascend_parallel.sharding.layout import backward as gradient_layout
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.across_meshes import empty_local, redistribute_across_meshes
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.edges import layout_of, leaf, spec_of
from ascend_parallel.sharding.redistribute.redistribute_local import redistribute_local
from ascend_parallel.sharding.redistribute.shortest_path import plan_redistribution

Mesh = ProcessMesh | DeviceMesh


def reshard(
    dtensor: DTensor, mesh: Mesh, placements: Sequence[dtensor.Placement], *, costs: MeshCosts | None = None
) -> DTensor:
    """Return the tensor with other placements as torch's own DTensor; else as `ascend_parallel.sharding.reshard`."""
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"reshard takes a DTensor, not a {type(dtensor).__name__}: make one by shard_tensor")
    target_mesh = ProcessMesh.of(mesh)
    target = layout_of(placements, target_mesh, dtensor.ndim)
    source_mesh = ProcessMesh.of(dtensor.device_mesh)
    source = layout_of(dtensor.placements, source_mesh, dtensor.ndim)
    if dtensor.dtype.is_complex and any(placement.op in ("max", "min") for placement in (*source, *target)):
        raise ValueError(f'Partial("max") and Partial("min") of {dtensor.dtype}: complex numbers have no order')
    averages = any(placement.op == "avg" for placement in (*source, *target))
    if averages and not dtensor.dtype.is_floating_point:
        raise ValueError(f'Partial("avg") of {dtensor.dtype}: averages are of floating-point tensors')
    if source_mesh.has_ranks_of(target_mesh):
        if source == target and source_mesh.dim_names == target_mesh.dim_names:
            return dtensor
        target_mesh.device_mesh()  # makes the target mesh's groups at its first use
    redistribution = _MeshRedistribution(source_mesh, source, target_mesh, target, costs)
    return cast(DTensor, _Reshard.apply(dtensor, redistribution))  # type: ignore[no-untyped-call]


def sharded(whole: torch.Tensor, mesh: ProcessMesh, placements: Sequence[dtensor.Placement]) -> DTensor:
    """Return the DTensor of a tensor that is the same on every rank; see `shard_tensor`."""
    device_mesh, layout = mesh.device_mesh(), layout_of(placements, mesh, whole.ndim)
    if mesh.coordinate(dist.get_rank()) is None:
        held = empty_local(whole.detach().to(device_mesh.device_type), whole.ndim)
        return cast(DTensor, _wrapped(held, whole.shape, mesh, layout).requires_grad_(whole.requires_grad))
    replicated = DTensor.from_local(whole, device_mesh, [Replicate()] * mesh.ndim, run_check=False)
    return reshard(replicated, mesh, placements)


@dataclass(frozen=True)
class _MeshRedistribution:
    """A redistribution from a layout on one mesh to a layout on the same or another mesh."""

    source_mesh: ProcessMesh
    source: Layout
    target_mesh: ProcessMesh
    target: Layout
    costs: MeshCosts | None

    def run(self, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return this rank's part in the target layout; the result shares no memory with `local`."""
        mesh, item = self.source_mesh, local.element_size()
        costs = self.costs or costs_of(mesh)
        crosses = not mesh.has_ranks_of(self.target_mesh)
        on_source = gradient_layout(self.source) if crosses else self.target  # across meshes without partials
        plan = plan_redistribution(shape, item, mesh.shape, self.source, on_source, costs)
        result = redistribute_local(local, shape, mesh, plan)
        if crosses:
            result = redistribute_across_meshes(result, shape, mesh, on_source, self.target_mesh, self.target)
        shared = result.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()

    def backward(self, arriving: Layout) -> _MeshRedistribution:
        """Return the redistribution of a gradient that arrives in the layout `arriving` on the target mesh."""
        costs = None if self.source_mesh is not self.target_mesh else self.costs
        return _MeshRedistribution(self.target_mesh, arriving, self.source_mesh, gradient_layout(self.source), costs)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, planned: _MeshRedistribution) -> DTensor:
        ctx.planned, ctx.local_shape = planned, dtensor.to_local().shape
        if any(placement.op in ("max", "min") for placement in planned.source):
            ctx.save_for_backward(dtensor)
        local = planned.run(dtensor.to_local(), dtensor.shape)
        return _wrapped(local, dtensor.shape, planned.target_mesh, planned.target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        planned, shape = ctx.planned, gradient.shape
        mesh, target = planned.target_mesh, planned.target
        arriving = layout_of(gradient.placements, mesh, gradient.ndim)
        local = gradient.to_local()
        if any(placement.kind == "partial" for placement in target):
            local = _MeshRedistribution(mesh, arriving, mesh, gradient_layout(target), None).run(local, shape)
            local = local * _averaged_ranks(target, mesh)
            whole = zip(target, gradient_layout(target), strict=True)
            arriving = tuple(SUM if p.op in ("max", "min") else after for p, after in whole)
        local = planned.backward(arriving).run(local, shape) / _averaged_ranks(planned.source, planned.source_mesh)
        for saved in ctx.saved_tensors:
            local = local * _extreme_share(saved.to_local(), shape, planned)
        if planned.source_mesh.coordinate(dist.get_rank()) is None:
            local = local.new_zeros(ctx.local_shape)
        return _wrapped(local, shape, planned.source_mesh, gradient_layout(planned.source)), None


def _extreme_share(local: torch.Tensor, shape: Sequence[int], planned: _MeshRedistribution) -> torch.Tensor:
    """Return, per element, this rank's share of the gradient of a maximum or minimum: 1 / ties, or 0."""
    mesh, reduced = planned.source_mesh, gradient_layout(planned.source)
    extreme = _MeshRedistribution(mesh, planned.source, mesh, reduced, None).run(local, shape)
    is_extreme = (local == extreme).to(local.dtype)
    sums = tuple(SUM if placement.kind == "partial" else placement for placement in planned.source)
    return is_extreme / _MeshRedistribution(mesh, sums, mesh, reduced, None).run(is_extreme, shape)


def _averaged_ranks(layout: Layout, mesh: ProcessMesh) -> int:
    return prod(size for placement, size in zip(layout, mesh.shape, strict=True) if placement.op == "avg")


def _wrapped(local: torch.Tensor, shape: torch.Size, mesh: ProcessMesh, layout: Layout) -> DTensor:
    # not from_local: it gives a rank outside the mesh a local tensor through which to_local cannot differentiate
    return leaf(DTensor, local, spec_of(mesh, layout, shape, local.dtype))


def hardware_of(mesh: ProcessMesh) -> str:
    """Return the name of the hardware whose costs decide among collectives on a mesh: that of its device type."""
    return device_type(mesh.device_mesh().device_type).hardware


def costs_of(mesh: ProcessMesh) -> MeshCosts:
    """Return the costs of collectives on a mesh."""
    return _costs(mesh, hardware_of(mesh))


@lru_cache(maxsize=64)
def _costs(mesh: ProcessMesh, hardware: str) -> MeshCosts:
    return MeshCosts.of(mesh, hardware)
