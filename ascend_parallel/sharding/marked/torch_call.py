"""A call of a torch function on DTensors, and plain tensors among its arguments: positions, masks and numbers.

torch refuses to mix plain tensors with DTensors. Here a plain tensor that meets a DTensor is taken as replicated, once
its ranks have compared it: a tensor with other values on some rank is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.sharding.graph import Ref
from ascend_parallel.sharding.tracing.function_calls import name_of


@dataclass(frozen=True)
class TorchCall:
    """A function and its arguments: `leaves` and `spec` of (args, kwargs), with a `Ref` in place of each tensor."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.function)

    def on(self, tensors: Sequence[Any]) -> Any:
        """Call the function with these tensors and return its result."""
        given = [tensors[leaf.index] if isinstance(leaf, Ref) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        return self.function(*args, **kwargs)


def as_replicated(tensor: torch.Tensor, mesh: DeviceMesh, function: Callable[..., Any]) -> DTensor:
    """Return a tensor that all ranks of the mesh hold alike as a DTensor; a DTensor as it is.

    Raises `ValueError` on every rank of the mesh for a tensor with other values on some rank.
    """
    if isinstance(tensor, DTensor):
        return tensor
    if mesh.get_coordinate() is not None and not _is_same(tensor, mesh):
        raise ValueError(
            f"{name_of(function)} gets a plain tensor, {list(tensor.shape)} of {tensor.dtype}, beside "
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
