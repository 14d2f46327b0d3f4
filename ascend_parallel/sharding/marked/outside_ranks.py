"""Functions on a rank outside of the mesh: they run on stand-ins, which have shapes and gradients but no values.

The rank's backward then goes where that of the mesh's ranks goes, and takes part in each reshard on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ascend_parallel.sharding.layout import Layout, backward, forward
from ascend_parallel.sharding.marked.torch_call import TorchCall
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.edges import Kind, layout_of, leaf, spec_of

_MODE = FakeTensorMode(allow_non_fake_inputs=True)


def is_outside(mesh: ProcessMesh) -> bool:
    """Tell whether this rank is outside of the mesh."""
    return mesh.coordinate(dist.get_rank()) is None


def on_stand_ins(
    call: TorchCall, tensors: Sequence[DTensor], layouts: Sequence[Layout], mesh: ProcessMesh
) -> tuple[Any, list[torch.Tensor]]:
    """Call a function with stand-ins of `tensors`; return its result, and the stand-ins after it.

    layouts
        In which the mesh's ranks read the tensors; gradients are laid out accordingly.

    Raises `ValueError` for a function of which the result's shape depends on values.
    """
    given: list[torch.Tensor] = [
        _StandIn.apply(tensor, layout, mesh, False)  # type: ignore[no-untyped-call]
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    try:
        with _MODE:
            return call.on(given), given
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{call.name} of a DTensor on {mesh}: its result depends on values that rank "
            f"{dist.get_rank()}, outside of the mesh, does not have; reshard to a mesh of all ranks before"
        ) from error


def from_stand_in(kind: Kind, stand_in: torch.Tensor, layout: Layout, mesh: ProcessMesh) -> DTensor:
    """Return the DTensor, without a part on this rank, of a function's result."""
    found: DTensor = _FromStandIn.apply(stand_in, kind, layout, mesh)  # type: ignore[no-untyped-call]
    return found


def unknown(dtensor: DTensor, mesh: ProcessMesh) -> torch.Tensor:
    """Return the whole tensor that this rank does not have: NaN everywhere; gradients flow back, without values.

    Raises `ValueError` for integers, which have no NaN.
    """
    if not (dtensor.dtype.is_floating_point or dtensor.dtype.is_complex):
        raise ValueError(
            f"rank {dist.get_rank()} is outside of {mesh} and has no values of a DTensor of {dtensor.dtype} on it: "
            "reshard to a mesh of all ranks before"
        )
    layout = layout_of(dtensor.placements, mesh, dtensor.ndim)
    whole: torch.Tensor = _StandIn.apply(dtensor, layout, mesh, True)  # type: ignore[no-untyped-call]
    return whole


def _no_part(kind: Kind, shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh: ProcessMesh) -> DTensor:
    local = torch.zeros((0,) * len(shape), dtype=dtype, device=mesh.device_mesh().device_type)
    return leaf(kind, local, spec_of(mesh, layout, shape, dtype))


class _StandIn(torch.autograd.Function):
    """The whole tensor of a DTensor: a fake one, or with `is_nan` one that is NaN everywhere."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, layout: Layout, mesh: ProcessMesh, is_nan: bool) -> torch.Tensor:
        ctx.shape, ctx.layout, ctx.mesh = tuple(dtensor.shape), backward(layout), mesh
        device = dtensor._local_tensor.device
        with nullcontext() if is_nan else _MODE:
            return torch.full(ctx.shape, float("nan") if is_nan else 0, dtype=dtensor.dtype, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None, None, None]:
        return _no_part(DTensor, ctx.shape, gradient.dtype, ctx.layout, ctx.mesh), None, None, None


class _FromStandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, kind: Kind, layout: Layout, mesh: ProcessMesh) -> DTensor:
        ctx.shape, ctx.dtype, ctx.device = tuple(stand_in.shape), stand_in.dtype, stand_in.device
        return _no_part(kind, ctx.shape, ctx.dtype, forward(layout), mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        with _MODE:
            return torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device), None, None, None
