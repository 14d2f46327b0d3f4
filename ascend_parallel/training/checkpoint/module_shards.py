"""This rank's tensor shards of any module, and of torch's optimizers: of DTensors and of plain tensors."""

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
    """Return this rank's shard of every parameter and persistent buffer, by name; shards share their memory.

    A plain tensor is one whole shard. A DTensor is left out if this rank is not in its mesh. Raises `ValueError` for
    state that is no tensor, and for a DTensor whose local tensor is not one contiguous range of each dimension.
    """
    found = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if value is None:  # the extra state of a module that has none
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}: save what is no tensor among the values")
        if _is_here(value):
            found[name] = _tensor_shard(name, value)
    return found


def optimizer_tensor_shards(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorShard]:
    """Return this rank's shard of every tensor of the state, as ``<parameter>.<key>``; shards share their memory.

    If the optimizer has made no step yet, a step of learning rate 0 creates its state first. Learning rates and other
    settings are left out. Raises `ValueError` for state that is no tensor.
    """
    state: dict[str, dict[str, Any]] = get_optimizer_state_dict(module, optimizer)["state"]  # type: ignore[assignment]
    found = {}
    for parameter, entries in state.items():
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{parameter}.{key} is a {type(value).__name__}, which shards cannot hold")
            if _is_here(value):
                found[f"{parameter}.{key}"] = _tensor_shard(f"{parameter}.{key}", value)
    return found


def _tensor_shard(name: str, tensor: torch.Tensor) -> TensorShard:
    """Return this rank's shard of a tensor; the `ValueError` for a placement that is no `TensorShard` has `name`."""
    if not isinstance(tensor, DTensor):
        return TensorShard.whole(tensor.detach())
    local = tensor.to_local().detach()
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not _is_contiguous(tensor) or tuple(shape) != tuple(local.shape):
        shown = ", ".join(map(str, tensor.placements))
        raise ValueError(f"{name} is placed as {shown}: only Shard and Replicate can be saved; redistribute it first")
    return TensorShard(local, tuple(tensor.shape), tuple(map(int, offsets)))


def _is_here(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def _is_contiguous(tensor: DTensor) -> bool:
    """Tell whether the local tensor is one range of each dimension.

    fully_shard's strided shards are, if the later mesh dimensions cut by the split factor.
    """
    for index, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            later = zip(tensor.placements[index + 1 :], tensor.device_mesh.shape[index + 1 :], strict=True)
            if (
                prod(size for inner, size in later if type(inner) is Shard and inner.dim == placement.dim)
                != placement.split_factor
            ):
                return False
        elif not placement.is_replicate() and not placement.is_shard():
            return False
    return True
