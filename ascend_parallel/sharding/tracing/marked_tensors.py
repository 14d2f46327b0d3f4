"""Tensors that `shard_tensor` and its relatives have marked, read while a model is traced.

A DTensor parameter is traced as a plain tensor of its global shape; its placements become a part of the graph, and a
plan keeps them. A tensor that the forward shards or reshards stays what it is; the node gets the placements as its
strategy. So the same marked model runs eagerly on DTensors and as a planned graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import Placed, in_place_of, named_tensors
from ascend_parallel.sharding.tracing.strategy_marks import marking

ATTRIBUTE = "_ascend_parallel_placements"
_TRACING: ContextVar[bool] = ContextVar("ascend_parallel_tracing", default=False)


def is_tracing() -> bool:
    """Tell whether `trace` runs a forward now."""
    return _TRACING.get()


def marked(tensor: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
    """Return a traced tensor whose node has these placements as its strategy; partial sums are left to the plan."""
    if any(isinstance(placement, Partial) for placement in placements):
        return tensor
    return marking(_resharded, None, [list(placements)])(tensor)


def _resharded(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return result


def placements_of(model: torch.nn.Module) -> dict[str, Placed]:
    """Return the placements of a model's DTensors, by name; a tied tensor under each of its names.

    Also those that `keep_placements` left on a model of plain tensors.
    """
    found: dict[str, Placed] = dict(vars(model).get(ATTRIBUTE) or {})
    for name, tensor in named_tensors(model, all_names=True).items():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"d{dim}" for dim in range(mesh.ndim))
            found[name] = Placed(tuple(zip(names, mesh.mesh.shape, strict=True)), tuple(tensor.placements))
    return found


def keep_placements(model: torch.nn.Module, placements: Mapping[str, Placed]) -> None:
    """Leave placements on a model of plain tensors, from where `trace` reads them."""
    vars(model)[ATTRIBUTE] = dict(placements)


def plain_copy(model: torch.nn.Module, plain: Callable[[DTensor], torch.Tensor]) -> torch.nn.Module:
    """Return a copy of a model with ``plain(tensor)`` in place of each DTensor; tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, DTensor):
            memo[id(tensor)] = in_place_of(tensor, plain(tensor))
    placements = placements_of(model)
    copied = copy.deepcopy(model, memo)
    keep_placements(copied, placements)
    return copied


@contextmanager
def plain_tensors(model: torch.nn.Module, arguments: Any) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield the model and its arguments for tracing: without DTensors, whose values tracing does not need."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    tensors = (*model.parameters(), *model.buffers())
    has_dtensors = any(isinstance(tensor, DTensor) for tensor in tensors)
    token = _TRACING.set(True)
    try:
        plain = pytree.tree_map_only(DTensor, empty, arguments)
        yield (plain_copy(model, lambda tensor: empty(tensor.detach())) if has_dtensors else model), plain
    finally:
        _TRACING.reset(token)
