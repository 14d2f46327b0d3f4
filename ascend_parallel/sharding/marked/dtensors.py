"""shard_tensor, dtensor_from_fn, dtensor_from_local, reshard and unshard, as in Paddle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate

from ascend_parallel.settings import current_settings
from ascend_parallel.sharding.marked.call import PropagatedDTensor
from ascend_parallel.sharding.marked.outside_ranks import is_outside, unknown
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute import reshard as redistribute
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.edges import as_kind, layout_of, leaf
from ascend_parallel.sharding.redistribute.reshard import Mesh, sharded
from ascend_parallel.sharding.runtime.input_checks import refuse_every_degree
from ascend_parallel.sharding.tracing.marked_tensors import is_tracing, marked


def shard_tensor(tensor: Any, mesh: Mesh, placements: Sequence[dtensor.Placement]) -> DTensor:
    """Return a DTensor of a tensor that is the same on every rank; sends nothing.

    A parameter stays an nn.Parameter and a leaf stays a leaf; for the result of a computation, gradients flow back. A
    DTensor is resharded. Every rank of the default group has to call it; a rank outside the mesh gets an empty part.

    What functions of it return is laid out by the rules of a graph (`PropagatedDTensor`), but for a parameter's, which
    stays torch's own DTensor: inside the forward of a module that `shard_layer` has marked.
    """
    if is_tracing():
        return cast(DTensor, marked(tensor, placements))
    refuse_every_degree(current_settings())
    whole = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
    if isinstance(whole, DTensor):
        placed = redistribute.reshard(whole, mesh, placements)
    else:
        placed = sharded(whole, ProcessMesh.of(mesh), placements)
    if isinstance(whole, torch.nn.Parameter):
        held = leaf(DTensor, placed._local_tensor, placed._spec)
        return torch.nn.Parameter(held, whole.requires_grad)  # type: ignore[return-value]
    if whole.is_leaf:
        return leaf(PropagatedDTensor, placed._local_tensor, placed._spec, whole.requires_grad)
    return as_kind(PropagatedDTensor, placed)


def dtensor_from_fn(
    fn: Callable[..., torch.Tensor], mesh: Mesh, placements: Sequence[dtensor.Placement], *args: Any, **kwargs: Any
) -> DTensor:
    """Return ``shard_tensor(fn(*args, **kwargs), mesh, placements)``; `fn` has to return the same on every rank."""
    return shard_tensor(fn(*args, **kwargs), mesh, placements)


def dtensor_from_local(local: torch.Tensor, mesh: Mesh, placements: Sequence[dtensor.Placement]) -> DTensor:
    """Return the DTensor whose part on this rank is `local`; sends nothing, and gradients flow back to `local`.

    All parts have the shape of `local`: a sharded dimension is as many times longer as the mesh dimension has ranks.
    With Partial("sum") the parts are terms. Every rank of the default group has to call it, with its own part; raises
    `ValueError` on a rank outside the mesh, and for placements that do not fit.
    """
    process_mesh = ProcessMesh.of(mesh)
    device_mesh, layout = process_mesh.device_mesh(), layout_of(placements, process_mesh, local.ndim)
    if process_mesh.coordinate(dist.get_rank()) is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {process_mesh}: it has no part of the tensor")
    given = [placement.placement for placement in layout]
    return as_kind(PropagatedDTensor, DTensor.from_local(local, device_mesh, given, run_check=False))


def reshard(
    dtensor: DTensor, mesh: Mesh, placements: Sequence[dtensor.Placement], *, costs: MeshCosts | None = None
) -> DTensor:
    """Return the tensor with other placements, on the same mesh or on another; gradients flow back.

    costs
        The costs of collectives on the tensor's mesh, which decide among them; by default those of the device type.

    Every rank of both meshes has to call it (at a mesh's first use, every rank of the default group). Raises
    `ValueError` for placements that do not fit tensor and mesh, `TypeError` if `dtensor` is no DTensor or `placements`
    no list.
    """
    if is_tracing() and not isinstance(dtensor, DTensor):
        return cast(DTensor, marked(dtensor, placements))
    return as_kind(PropagatedDTensor, redistribute.reshard(dtensor, mesh, placements, costs=costs))


def unshard(dtensor: DTensor) -> torch.Tensor:
    """Return the whole tensor on every rank of its mesh; gradients flow back.

    A rank outside of the mesh does not have the values and gets NaN in their place (`ValueError` for integers).
    """
    if is_tracing() and not isinstance(dtensor, DTensor):
        return cast(torch.Tensor, dtensor)
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"unshard takes a DTensor, not a {type(dtensor).__name__}")
    mesh = ProcessMesh.of(dtensor.device_mesh)
    if is_outside(mesh):
        return unknown(dtensor, mesh)
    return redistribute.reshard(dtensor, mesh, [Replicate()] * mesh.ndim).to_local()
