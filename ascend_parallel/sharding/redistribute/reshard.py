"""shard_tensor, dtensor_from_fn, reshard and unshard: torch's DTensor between any placements and meshes.

The gradient of a Shard is that Shard, of a Replicate and of a Partial a Replicate, on the mesh of the tensor itself.
What a rank's local tensor receives is the derivative by it: of a sum's part the whole gradient, of an average's part
that divided by the number of ranks, of a maximum's or minimum's part the gradient where this rank has it (shared by
ties).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ascend_parallel.sharding.layout import REPLICATE, SUM, Layout, Placement, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.across_meshes import exchange, nothing
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.losses import mend_losses
from ascend_parallel.sharding.redistribute.redistribute_local import move
from ascend_parallel.sharding.redistribute.shortest_path import plan_redistribution

Mesh = ProcessMesh | DeviceMesh
OPS = ("sum", "avg", "max", "min")
# Whose collectives the plans of a device type are made by.
HARDWARE = {"cpu": "cpu-gloo", "cuda": "h100-nvlink"}


def shard_tensor(tensor: Any, mesh: Mesh, placements: Sequence[dtensor.Placement]) -> DTensor:
    """Return a tensor that every rank has whole, the same on all of them, as a DTensor; nothing is sent.

    A parameter stays an nn.Parameter and a leaf a leaf; to the result of a computation gradients flow back. A DTensor
    is resharded. Every rank of the default group has to call it; one that is not in the mesh gets an empty part.

    From the first call on DTensor takes means of losses (`losses.py`) over whole tensors, as on one rank.
    """
    mend_losses()
    given = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
    if isinstance(given, DTensor):
        made = reshard(given, mesh, placements)
    else:
        made = _sharded(given, ProcessMesh.of(mesh), placements)
    if isinstance(given, torch.nn.Parameter):
        return torch.nn.Parameter(made.detach(), given.requires_grad)  # type: ignore[return-value]
    if given.is_leaf:
        return cast(DTensor, made.detach().requires_grad_(given.requires_grad))
    return made


def dtensor_from_fn(
    fn: Callable[..., torch.Tensor], mesh: Mesh, placements: Sequence[dtensor.Placement], *args: Any, **kwargs: Any
) -> DTensor:
    """Return ``shard_tensor(fn(*args, **kwargs), mesh, placements)``; `fn` has to return the same on every rank."""
    return shard_tensor(fn(*args, **kwargs), mesh, placements)


def reshard(
    dtensor: DTensor, mesh: Mesh, placements: Sequence[dtensor.Placement], *, costs: MeshCosts | None = None
) -> DTensor:
    """Return the tensor with other placements, on the same mesh or on another; gradients flow back.

    costs
        What collectives cost on the tensor's mesh, for the choice among them; by default by the kind of device.

    Every rank of both meshes has to call it (of the default group the first time a mesh is used). Raises
    `ValueError` for placements that do not fit tensor and mesh, `TypeError` for what is no DTensor or no list.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"reshard takes a DTensor, not a {type(dtensor).__name__}: make one by shard_tensor")
    target_mesh = ProcessMesh.of(mesh)
    target = layout_of(placements, target_mesh, dtensor.ndim)
    source_mesh = ProcessMesh.of(dtensor.device_mesh)
    source = layout_of(dtensor.placements, source_mesh, dtensor.ndim)
    if dtensor.dtype.is_complex and any(state.op in ("max", "min") for state in (*source, *target)):
        raise ValueError(f'Partial("max") and Partial("min") of {dtensor.dtype}: complex numbers have no order')
    if any(state.op == "avg" for state in (*source, *target)) and not dtensor.dtype.is_floating_point:
        raise ValueError(f'Partial("avg") of {dtensor.dtype}: averages are of floating-point tensors')
    if source_mesh.has_ranks_of(target_mesh):
        if source == target and source_mesh.dim_names == target_mesh.dim_names:
            return dtensor
        target_mesh.device_mesh()  # its groups are made wherever it is first named
    way = _Way(source_mesh, source, target_mesh, target, costs)
    return cast(DTensor, _Reshard.apply(dtensor, way))  # type: ignore[no-untyped-call]


def unshard(dtensor: DTensor) -> torch.Tensor:
    """Return the whole tensor on every rank of its mesh; gradients flow back."""
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"unshard takes a DTensor, not a {type(dtensor).__name__}")
    mesh = ProcessMesh.of(dtensor.device_mesh)
    return reshard(dtensor, mesh, [Replicate()] * mesh.ndim).to_local()


def layout_of(placements: Sequence[dtensor.Placement], mesh: ProcessMesh, dims: int) -> Layout:
    """Return the layout of placements; raises `ValueError` for what does not fit a tensor of `dims` dimensions."""
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise TypeError(f"placements={placements!r}: give a list with one for each mesh dimension, such as [Shard(0)]")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{list(placements)}: give one placement for each mesh dimension ({', '.join(mesh.dim_names)})"
        )
    return tuple(_state(placement, dims) for placement in placements)


def _sharded(whole: torch.Tensor, mesh: ProcessMesh, placements: Sequence[dtensor.Placement]) -> DTensor:
    device_mesh, layout = mesh.device_mesh(), layout_of(placements, mesh, whole.ndim)
    if mesh.coordinate(dist.get_rank()) is None:
        held = nothing(whole.detach().to(device_mesh.device_type), whole.ndim)
        return cast(DTensor, _wrapped(held, whole.shape, mesh, layout).requires_grad_(whole.requires_grad))
    replicated = DTensor.from_local(whole, device_mesh, [Replicate()] * mesh.ndim, run_check=False)
    return reshard(replicated, mesh, placements)


def _state(placement: dtensor.Placement, dims: int) -> Placement:
    if type(placement) is Replicate:
        return REPLICATE
    if type(placement) is Shard and -dims <= placement.dim < dims:
        return shard(placement.dim % dims)
    if type(placement) is Partial and placement.reduce_op in OPS:
        return Placement("partial", op=str(placement.reduce_op))
    ops = ", ".join(repr(op) for op in OPS)
    cut = f"Shard({-dims}) to Shard({dims - 1})" if dims else "no Shard for a scalar"
    raise ValueError(f"{placement!r}: give Replicate(), {cut}, or Partial with one of {ops}")


@dataclass(frozen=True)
class _Way:
    """From a layout on a mesh to a layout on a mesh."""

    source_mesh: ProcessMesh
    source: Layout
    target_mesh: ProcessMesh
    target: Layout
    costs: MeshCosts | None

    def go(self, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Bring this rank's part there; the result shares no memory with `local`."""
        mesh, item = self.source_mesh, local.element_size()
        costs = self.costs or _default_costs(mesh, mesh.device_mesh().device_type)
        crosses = not mesh.has_ranks_of(self.target_mesh)
        reached = tuple(REPLICATE if state.kind == "partial" else state for state in self.source)
        reached = reached if crosses else self.target
        plan = plan_redistribution(shape, item, mesh.shape, self.source, reached, costs)
        moved = move(local, shape, mesh, plan)
        if crosses:
            moved = exchange(moved, shape, mesh, reached, self.target_mesh, self.target)
        shared = moved.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return moved.clone(memory_format=torch.contiguous_format) if shared else moved.contiguous()

    def back(self, arriving: Layout) -> _Way:
        """Return the way of a gradient that arrives in a layout on the target mesh."""
        costs = None if self.source_mesh is not self.target_mesh else self.costs
        return _Way(self.target_mesh, arriving, self.source_mesh, _dual(self.source), costs)


class _Reshard(torch.autograd.Function):
    """Goes a way, and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, way: _Way) -> DTensor:
        ctx.way, ctx.held = way, dtensor.to_local().shape
        if any(state.op in ("max", "min") for state in way.source):
            ctx.save_for_backward(dtensor)
        return _wrapped(way.go(dtensor.to_local(), dtensor.shape), dtensor.shape, way.target_mesh, way.target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        way, shape = ctx.way, gradient.shape
        arriving = layout_of(gradient.placements, way.target_mesh, gradient.ndim)
        local = gradient.to_local()
        if any(state.kind == "partial" for state in way.target):
            local = _Way(way.target_mesh, arriving, way.target_mesh, _dual(way.target), None).go(local, shape)
            local = local * _averaged(way.target, way.target_mesh)
            arriving = tuple(SUM if state.op in ("max", "min") else _dual([state])[0] for state in way.target)
        local = way.back(arriving).go(local, shape) / _averaged(way.source, way.source_mesh)
        for saved in ctx.saved_tensors:
            local = local * _share(saved.to_local(), shape, way)
        if way.source_mesh.coordinate(dist.get_rank()) is None:
            local = local.new_zeros(ctx.held)
        return _wrapped(local, shape, way.source_mesh, _dual(way.source)), None


def _share(local: torch.Tensor, shape: Sequence[int], way: _Way) -> torch.Tensor:
    """Return, element by element, the share of the gradient that a part of a maximum or minimum has."""
    mesh = way.source_mesh
    reached = tuple(REPLICATE if state.kind == "partial" else state for state in way.source)
    extreme = _Way(mesh, way.source, mesh, reached, None).go(local, shape)
    is_it = (local == extreme).to(local.dtype)
    parts = tuple(SUM if state.kind == "partial" else state for state in way.source)
    return is_it / _Way(mesh, parts, mesh, reached, None).go(is_it, shape)


def _dual(layout: Sequence[Placement]) -> Layout:
    """Return the layout of the gradient."""
    return tuple(state if state.kind == "shard" else REPLICATE for state in layout)


def _averaged(layout: Layout, mesh: ProcessMesh) -> int:
    """Return of how many ranks the tensor is the average."""
    return prod(size for state, size in zip(layout, mesh.shape, strict=True) if state.op == "avg")


def _wrapped(local: torch.Tensor, shape: torch.Size, mesh: ProcessMesh, layout: Layout) -> DTensor:
    meta = TensorMeta(shape, _strides(shape), local.dtype)
    spec = DTensorSpec(mesh.device_mesh(), tuple(state.placement for state in layout), tensor_meta=meta)
    # not from_local, which gives a rank outside the mesh a local tensor that torch's to_local cannot go back through
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


@lru_cache(maxsize=64)
def _default_costs(mesh: ProcessMesh, device_type: str) -> MeshCosts:
    return MeshCosts.of(mesh, HARDWARE.get(device_type, "910b"))
