"""Between DTensors and ranks' parts, for autograd: gradients are DTensors, laid out as the part was read."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ascend_parallel.sharding.graph import TensorMeta
from ascend_parallel.sharding.layout import Layout, backward, forward
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.reshard import layout_of, spec_of
from ascend_parallel.sharding.runtime.redistribute_autograd import convert

Kind = type[DTensor]


def leaf(kind: Kind, local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """Return a rank's part as a DTensor of class `kind`, a leaf of autograd."""
    return kind(local.detach(), spec, requires_grad=requires_grad)


def as_kind(kind: Kind, dtensor: DTensor) -> DTensor:
    """Return a DTensor as one of class `kind`: a leaf stays a leaf, else gradients flow back."""
    if type(dtensor) is kind:
        return dtensor
    if dtensor.is_leaf:
        return leaf(kind, dtensor._local_tensor, dtensor._spec, dtensor.requires_grad)
    taken: DTensor = _AsKind.apply(dtensor, kind)  # type: ignore[no-untyped-call]
    return taken


class _AsKind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, kind: Kind) -> DTensor:
        return leaf(kind, dtensor._local_tensor, dtensor._spec)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return gradient, None


def local_part(dtensor: DTensor, layout: Layout, mesh: ProcessMesh) -> torch.Tensor:
    """Return a rank's part of a DTensor; its gradient becomes a DTensor in the gradient's layout of `layout`."""
    if not (dtensor.requires_grad and torch.is_grad_enabled()):
        return dtensor._local_tensor
    part: torch.Tensor = _LocalPart.apply(dtensor, layout, mesh)  # type: ignore[no-untyped-call]
    return part


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, layout: Layout, mesh: ProcessMesh) -> torch.Tensor:
        ctx.mesh, ctx.layout, ctx.shape = mesh, backward(layout), tuple(dtensor.shape)
        return dtensor._local_tensor.view_as(dtensor._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None, None]:
        spec = spec_of(ctx.mesh, ctx.layout, ctx.shape, gradient.dtype)
        return leaf(DTensor, gradient.contiguous(), spec), None, None


def from_part(
    kind: Kind, local: torch.Tensor, meta: TensorMeta, layout: Layout, mesh: ProcessMesh, costs: MeshCosts
) -> DTensor:
    """Return the DTensor of the ranks' parts in `layout`; `costs` decide how its gradient is redistributed."""
    if not local.requires_grad:
        return leaf(kind, local, spec_of(mesh, forward(layout), meta.shape, meta.dtype))
    whole: DTensor = _FromPart.apply(local, kind, meta, layout, mesh, costs)  # type: ignore[no-untyped-call]
    return whole


class _FromPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, kind: Kind, meta: TensorMeta, layout: Layout, mesh: ProcessMesh, costs: MeshCosts
    ) -> DTensor:
        ctx.mesh, ctx.layout, ctx.shape, ctx.costs = mesh, backward(layout), meta.shape, costs
        return leaf(kind, local, spec_of(mesh, forward(layout), meta.shape, meta.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        arriving = layout_of(gradient.placements, ctx.mesh, gradient.ndim)
        local = convert(gradient._local_tensor, ctx.shape, ctx.mesh, arriving, ctx.layout, ctx.costs)
        return local, None, None, None, None, None


def take_over(tensor: DTensor, new: DTensor) -> None:
    """Make a tensor the result `new` of an in-place function, for autograd too. Raises torch's error for a leaf."""
    _TakeOver.apply(tensor, new)  # type: ignore[no-untyped-call]


class _TakeOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, new: DTensor) -> DTensor:
        tensor._local_tensor, tensor._spec = new._local_tensor, new._spec
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[None, DTensor]:
        return None, gradient
