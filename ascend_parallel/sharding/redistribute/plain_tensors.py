"""Plain tensors in the forward of a marked model: positions, masks and numbers that its code makes beside DTensors.

torch refuses to mix them with DTensors. Here a plain tensor that meets a DTensor is taken as replicated, once its ranks
have compared it: a tensor with other values on some rank is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree


class ReplicatedPlainTensors(TorchFunctionMode):
    """Replaces each plain tensor that a function gets beside a DTensor by a replicated DTensor.

    A function that writes to a plain tensor runs unchanged, and torch refuses it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function. Raises `ValueError` on every rank for a plain tensor with other values on some rank."""
        named = dict(kwargs or {})
        leaves, spec = pytree.tree_flatten((args, named))
        beside = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
        if beside is not None and any(map(_is_plain, leaves)) and not _writes(func, args, named):
            mesh = beside.device_mesh
            leaves = [_replicated(leaf, mesh, func) if _is_plain(leaf) else leaf for leaf in leaves]
            args, named = pytree.tree_unflatten(leaves, spec)
        result = func(*args, **named)
        if beside is not None and func is F.scaled_dot_product_attention:
            # Its output is a transposed view, and after a gather the local tensor's strides are others than DTensor's.
            return result.clone(memory_format=torch.contiguous_format)
        return result


def replicate_plain_tensors(layer: nn.Module) -> None:
    """Run the forwards of `layer` under `ReplicatedPlainTensors`, while its parameters are DTensors."""
    running: list[ReplicatedPlainTensors | None] = []

    def enter(module: nn.Module, _: Any) -> None:
        marked = any(isinstance(tensor, DTensor) for tensor in (*module.parameters(), *module.buffers()))
        mode = ReplicatedPlainTensors() if marked and not any(running) else None
        running.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        mode = running.pop() if running else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    layer.register_forward_pre_hook(enter, prepend=True)
    layer.register_forward_hook(leave, always_call=True)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)


def _writes(func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Tell whether a function writes to a plain tensor."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.startswith("__i") and name.endswith("__")) or name.endswith("_")
    first = bool(args) and _is_plain(args[0])
    return (first and in_place and name not in ("__invert__", "__index__", "__int__")) or "out" in named


def _replicated(tensor: torch.Tensor, mesh: DeviceMesh, func: Callable[..., Any]) -> DTensor:
    """Return a tensor that all ranks of the mesh hold alike as a DTensor."""
    if mesh.get_coordinate() is not None and not _is_same(tensor, mesh):
        raise ValueError(
            f"{resolve_name(func) or func} gets a plain tensor, {list(tensor.shape)} of {tensor.dtype}, beside "
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
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return int(extremes[0]) == -int(extremes[1])
