"""The shards that a module, and an optimizer of torch's, have on this rank: of DTensors and of plain tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ascend_parallel.sharding.tensor_shard import TensorShard


def tensor_shards_of(module: torch.nn.Module) -> dict[str, TensorShard]:
    """Return this rank's shard of every parameter and persistent buffer, by name; sharing memory with them.

    A plain tensor is held whole; a DTensor whose mesh this rank is not in is left out. Raises `ValueError` for state
    that is no tensor, and for a DTensor whose part here is no box of it.
    """
    found = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if value is None:  # what a module without extra state gives for it
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}: save what is no tensor among the values")
        if _is_here(value):
            found[name] = piece_of(name, value)
    return found


def optimizer_tensor_shards(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorShard]:
    """Return this rank's shard of every tensor of the state, named ``<parameter>.<key>``; sharing memory with them.

    An optimizer that has made no step yet is given its state first, with a step of learning rate 0. Learning rates and
    other settings are not part of it. Raises `ValueError` for state that is no tensor.
    """
    state: dict[str, dict[str, Any]] = get_optimizer_state_dict(module, optimizer)["state"]  # type: ignore[assignment]
    found = {}
    for parameter, entries in state.items():
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{parameter}.{key} is a {type(value).__name__}, which shards cannot hold")
            if _is_here(value):
                found[f"{parameter}.{key}"] = piece_of(f"{parameter}.{key}", value)
    return found


def piece_of(name: str, tensor: torch.Tensor) -> TensorShard:
    """Return this rank's shard of a tensor; `name` is for the `ValueError` if its part is no box of the whole."""
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    local = tensor.to_local().detach()
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not _is_box(tensor) or tuple(shape) != tuple(local.shape):
        shown = ", ".join(map(str, tensor.placements))
        raise ValueError(f"{name} is placed as {shown}: Shard and Replicate are boxes; redistribute it first")
    return TensorShard(local, tuple(tensor.shape), tuple(map(int, offsets)))


def _is_here(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def _is_box(tensor: DTensor) -> bool:
    """Tell whether a rank's part is one box. fully_shard's strided shards are, if later dimensions cut as they say."""
    for at, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            later = zip(tensor.placements[at + 1 :], tensor.device_mesh.shape[at + 1 :], strict=True)
            if (
                prod(size for other, size in later if type(other) is Shard and other.dim == placement.dim)
                != placement.split_factor
            ):
                return False
        elif not placement.is_replicate() and not placement.is_shard():
            return False
    return True
