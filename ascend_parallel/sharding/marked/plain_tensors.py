"""Plain tensors beside DTensors: positions, masks and numbers that a model's code makes.

torch refuses to mix them with DTensors. Here a plain tensor that meets a DTensor is taken as replicated, once its ranks
have compared it: a tensor with other values on some rank is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import resolve_name

from ascend_parallel.ops.pending import run_collective


def as_replicated(tensor: torch.Tensor, mesh: DeviceMesh, function: Callable[..., Any]) -> DTensor:
    """Return a tensor that all ranks of the mesh hold alike as a DTensor; a DTensor as it is.

    Raises `ValueError` on every rank of the mesh for a tensor with other values on some rank.
    """
    if isinstance(tensor, DTensor):
        return tensor
    if mesh.get_coordinate() is not None and not _is_same(tensor, mesh):
        raise ValueError(
            f"{resolve_name(function) or function} gets a plain tensor, {list(tensor.shape)} of {tensor.dtype}, beside "
            "DTensors, and its values are not the same on all ranks: make it a DTensor, by shard_tensor of the whole "
            "tensor or by dtensor_from_local of each rank's part"
        )
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_same(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Tell, alike on all ranks of the mesh, whether they all have the same shape, dtype and bits."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=7)
    digest.update(plain.data)
    number = int.from_bytes(digest.digest(), "big")
    extremes = torch.tensor([number, -number], device=mesh.device_type)
    for dim in range(mesh.ndim):
        run_collective(
            "the comparison of a plain tensor",
            dist.all_reduce,
            extremes,
            group=mesh.get_group(dim),
            op=dist.ReduceOp.MAX,
        )
    return int(extremes[0]) == -int(extremes[1])
