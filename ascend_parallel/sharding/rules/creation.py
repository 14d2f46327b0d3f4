"""Operators that create tensors: the output is replicated, because slicing it costs nothing."""

from __future__ import annotations

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.rules.axes import Axis, cut
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all

CREATIONS = "arange zeros ones full empty eye linspace scalar_tensor tril_indices triu_indices"
RANDOM = "rand randn randint randperm normal"
NEW = "new_zeros new_ones new_full new_empty"


def created(call: OpCall) -> list[OpPlacements]:
    """No strategy besides the whole tensor on every rank."""
    return []


def made_like(call: OpCall) -> list[OpPlacements]:
    """new_zeros and others: the output takes only the input's dtype. Shard any dimension of the input."""
    dims = len(call.inputs[0].shape)
    return cut(call, [Axis((dim,), (None,), REPLICATE) for dim in range(dims)])


def register() -> None:
    """Register this file's rules."""
    register_all(CREATIONS, created)
    register_all(RANDOM, created)
    register_all(NEW, made_like)
