"""Functions that cannot be laid out: every rank runs them on whole tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.sharding.graph import TensorMeta
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.marked.outside_ranks import from_stand_in, is_outside, on_stand_ins, unknown
from ascend_parallel.sharding.marked.torch_call import TorchCall
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.edges import Kind, convert, from_part, layout_of, local_part
from ascend_parallel.sharding.redistribute.reshard import costs_of
from ascend_parallel.sharding.tracing.function_calls import name_of

log = logging.getLogger("ascend_parallel")


@cache
def runs_whole(function: Callable[..., Any], why: str) -> None:
    """Say once, on rank 0, that a function runs on whole tensors."""
    if dist.get_rank() == 0:
        log.warning("%s runs on whole tensors on every rank: %s", name_of(function), why)


def on_whole_tensors(kind: Kind, call: TorchCall, tensors: Sequence[DTensor], mesh: ProcessMesh, *, draws: bool) -> Any:
    """Return the result of a function of gathered tensors, its tensors as replicated DTensors of class `kind`.

    draws
        Whether the function may draw random numbers: they are the same on all ranks.

    Raises `ValueError` for a function that writes to a tensor.
    """
    costs, whole = costs_of(mesh), (REPLICATE,) * mesh.ndim
    if is_outside(mesh):
        return _outside(kind, call, tensors, mesh, values=not draws)
    gathered = []
    for tensor in tensors:
        layout = layout_of(tensor.placements, mesh, tensor.ndim)
        gathered.append(convert(local_part(tensor, layout, mesh), tuple(tensor.shape), mesh, layout, whole, costs))
    versions = [tensor._version for tensor in gathered]
    with _seeded(first_rank_draws(mesh), mesh) if draws else nullcontext():
        returned = call.on(gathered)
    if [tensor._version for tensor in gathered] != versions:
        raise ValueError(
            f"{call.name} writes to a DTensor, and cannot be laid out over ranks: use the "
            "function that returns a new tensor"
        )
    same = {id(plain): tensor for plain, tensor in zip(gathered, tensors, strict=True)}

    def as_dtensor(tensor: torch.Tensor) -> DTensor:
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
        return same[id(tensor)] if id(tensor) in same else from_part(kind, tensor, meta, whole, mesh, costs)

    return pytree.tree_map_only(torch.Tensor, as_dtensor, returned)


def _outside(kind: Kind, call: TorchCall, tensors: Sequence[DTensor], mesh: ProcessMesh, *, values: bool) -> Any:
    """Return the result's stand-in on a rank outside of the mesh; the function reads NaN in place of values."""
    if values:
        return call.on([unknown(tensor, mesh) for tensor in tensors])
    layouts = [layout_of(tensor.placements, mesh, tensor.ndim) for tensor in tensors]
    returned, _ = on_stand_ins(call, tensors, layouts, mesh)
    whole = (REPLICATE,) * mesh.ndim
    return pytree.tree_map_only(torch.Tensor, lambda tensor: from_stand_in(kind, tensor, whole, mesh), returned)


def first_rank_draws(mesh: ProcessMesh) -> str:
    """Return a name of random numbers that the first rank of the mesh draws from its generator, the same on all ranks.

    Every rank draws, so that ranks that were seeded alike stay alike.
    """
    number = torch.randint(0, 2**62, (), dtype=torch.int64).to(mesh.device_mesh().device_type)
    for dim in range(mesh.ndim):
        group = mesh.group(dim)
        run_collective("the drawing of a seed", dist.broadcast, number, group=group, group_src=0)
    return str(int(number))


@contextmanager
def _seeded(number: str, mesh: ProcessMesh) -> Iterator[None]:
    device = mesh.device_mesh().device_type
    devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
    with torch.random.fork_rng(devices, device_type=device if devices else "cuda"):
        torch.manual_seed(int(number))
        yield
