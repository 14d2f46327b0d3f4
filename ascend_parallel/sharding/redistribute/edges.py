"""Between DTensors and ranks' parts, and between layouts, for autograd.

`local_part` and `from_part` are the edges: a DTensor's part here, and the DTensor of the ranks' parts. Gradients are
DTensors there, laid out as the part was read. `convert` moves a part from `source` to `target`, and in backward the
gradient from the target's gradient placement to the source's (layout.py: a placement also places the gradient; R* is a
replicated tensor whose gradient is a partial sum). On one mesh dimension, where R is replicate, S shard and P partial:

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as torch_spec

from ascend_parallel.sharding.graph import TensorMeta
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, SUM, Layout, Placement, Shape, backward, forward, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.redistribute_local import (
    MeshDimStep,
    RequestGenerator,
    finish_redistribute,
    lines_of,
    redistribute_requests,
)
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep, Redistribution, plan_redistribution

OPS = ("sum", "avg", "max", "min")
Kind = type[DTensor]
Observer = Callable[[str, RedistributeStep], None]
"""Called with "forward" or "backward" and a step that communicates, when the step starts."""


def layout_of(placements: Sequence[dtensor.Placement], mesh: ProcessMesh, dims: int) -> Layout:
    """Return the layout of torch placements; raises `ValueError` if they do not fit a tensor of `dims` dimensions."""
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise TypeError(f"placements={placements!r}: give a list with one for each mesh dimension, such as [Shard(0)]")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{list(placements)}: give one placement for each mesh dimension ({', '.join(mesh.dim_names)})"
        )
    return tuple(_placement_of(placement, dims) for placement in placements)


def _placement_of(placement: dtensor.Placement, dims: int) -> Placement:
    if type(placement) is Replicate:
        return REPLICATE
    if type(placement) is Shard and -dims <= placement.dim < dims:
        return shard(placement.dim % dims)
    if type(placement) is Partial and placement.reduce_op in OPS:
        return Placement("partial", op=str(placement.reduce_op))
    ops = ", ".join(repr(op) for op in OPS)
    cut = f"Shard({-dims}) to Shard({dims - 1})" if dims else "no Shard for a scalar"
    raise ValueError(f"{placement!r}: give Replicate(), {cut}, or Partial with one of {ops}")


def spec_of(mesh: ProcessMesh, layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> torch_spec.DTensorSpec:
    """Return torch's description of a contiguous tensor in a layout."""
    strides = tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    placements = tuple(placement.placement for placement in layout)
    meta = torch_spec.TensorMeta(torch.Size(shape), strides, dtype)
    return torch_spec.DTensorSpec(mesh.device_mesh(), placements, tensor_meta=meta)


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
    plan = plan_differentiable(tuple(shape), local.element_size(), mesh, source, target, costs)
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
    source, target, factor = _without_averages(source, target, mesh.shape)

    def planned(before: Layout, after: Layout) -> Redistribution:
        return plan_redistribution(shape, itemsize, mesh.shape, before, after, costs)

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


def leaf(kind: Kind, local: torch.Tensor, spec: torch_spec.DTensorSpec, requires_grad: bool = False) -> DTensor:
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
        ctx.spec = dtensor._spec if dtensor._local_tensor.is_contiguous() else None
        return dtensor._local_tensor.view_as(dtensor._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None, None]:
        spec = ctx.spec  # most gradients lie as their tensor does: making a spec takes longer than the rest here
        placements = tuple(placement.placement for placement in ctx.layout)
        if spec is None or (spec.placements, spec.tensor_meta.dtype) != (placements, gradient.dtype):
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
