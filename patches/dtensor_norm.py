"""The norm of sharded DTensors with the same bits at every tensor-parallel degree: what torch clips gradients with.

torch sums the squares of each rank's shard, then those sums. With COC_DETERMINISTIC=tp a norm of all elements is that
of the blocks of the sharded dimension, in the tree. `torch.nn.utils.clip_grad_norm_` then needs no other call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.ops.blocks import BLOCKS, BlockedFeatures
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.tree import sum_of_blocks

_NORM = torch.ops.aten.linalg_vector_norm.default
_NORMS = torch.ops.aten._foreach_norm.Scalar
_LOG_SOFTMAX = torch.ops.aten._log_softmax.default


def install_norms() -> None:
    """Have DTensor call the norms of this module."""
    _handlers().update({_NORM: _norm, _NORMS: _norms})


def remove_norms() -> None:
    """Have DTensor call its own norms."""
    for operator in (_NORM, _NORMS):
        _handlers().pop(operator, None)


def refuse_loss_parallel() -> None:
    """Raise `DegreeError` inside of torch's `loss_parallel`: its sum over the vocabulary has no tree."""
    if _LOG_SOFTMAX in _handlers():
        raise DegreeError(
            "loss_parallel() sums over each rank's part of the vocabulary, which has no tree: "
            "give the output layer output_layouts=Replicate(), and the loss plain logits"
        )


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else 2
    of_all = all(option is None for option in args[2:3]) and len(args) < 4 and kwargs.keys() <= {"dtype"}
    if not _sums(order) or not of_all or not _sharded(x) or _narrows(x, kwargs.get("dtype")):
        return _by_torch(operator, args, kwargs)
    return _norm_of(x, order, kwargs.get("dtype"))


def _norms(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    if not _sums(order) or not any(map(_sharded, tensors)) or any(_narrows(x, dtype) for x in tensors):
        return _by_torch(operator, args, kwargs)
    return [
        _norm_of(x, order, dtype) if _sharded(x) else torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors
    ]


def _sums(order: float) -> bool:
    """Tell whether a norm of an order is of a sum that rounds: not a largest or smallest element, nor a count."""
    return math.isfinite(order) and order != 0


def _by_torch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = _handlers().pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        _handlers()[operator] = own


def _sharded(x: Any) -> bool:
    return isinstance(x, DTensor) and any(isinstance(each, Shard) for each in x.placements)


def _narrows(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Tell whether a dtype cannot hold x: torch refuses it."""
    return dtype is not None and torch.promote_types(x.dtype, dtype) != dtype


def _norm_of(x: DTensor, order: float, dtype: torch.dtype | None) -> DTensor:
    """Return the norm of x of a finite order, sharded on the only dimension of its mesh, summed in fp32 or float64.

    dtype: x is converted to it first, and the norm has it; None: that of x.
    """
    if x.device_mesh.ndim > 1:
        raise DegreeError(
            f"the norm of a DTensor placed as {x.placements} on {x.device_mesh.ndim} dimensions of a mesh has no tree"
        )
    group, (placement,) = x.device_mesh.get_group(), x.placements
    assert isinstance(placement, Shard)
    local = x.to_local().to(dtype or x.dtype)
    blocks = powers_of_blocks(local, order, [x.shape[placement.dim]], placement.dim, group)
    total = sum_of_blocks(list(blocks), group)
    norm = total.sqrt() if order == 2 else total.pow(1 / order)
    return DTensor.from_local(norm.to(local.dtype), x.device_mesh, [Replicate()], run_check=False)


def squares_of_blocks(local: torch.Tensor, features: Iterable[int], dim: int, group: Any) -> torch.Tensor:
    """Return the sums of squares [8 / R], in fp32 or float64, of this rank's blocks along `dim`.

    features
        Of all ranks, for each packed part.
    """
    return powers_of_blocks(local, 2, features, dim, group)


def powers_of_blocks(local: torch.Tensor, order: float, features: Iterable[int], dim: int, group: Any) -> torch.Tensor:
    """Return the sums [8 / R] of ``abs(x) ** order``, as `squares_of_blocks` does."""
    blocked = BlockedFeatures(tuple(each // group.size() for each in features), group.size())
    if blocked.refusal or sum(blocked.parts) != local.shape[dim]:
        raise DegreeError(
            f"norm of a tensor {list(local.shape)} on {group.size()} ranks: dimension {dim} "
            f"cannot be cut into {BLOCKS} equal blocks"
        )
    wide = torch.promote_types(local.dtype, torch.float32)
    blocks = [block.to(wide) for block in blocked.blocks_of(local.detach(), dim)]
    return torch.stack([(x.square() if order == 2 else x.abs().pow(order)).sum() for x in blocks])
