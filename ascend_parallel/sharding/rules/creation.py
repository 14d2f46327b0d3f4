"""Operators that make a tensor out of no other: replicated, for a slice of it costs nothing."""

from __future__ import annotations

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.rules.axes import Axis, cut
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all

CREATIONS = "arange zeros ones full empty eye linspace scalar_tensor tril_indices triu_indices"
RANDOM = "rand randn randint randperm normal"
NEW = "new_zeros new_ones new_full new_empty"


def created(call: OpCall) -> list[OpPlacements]:
    """Whole on every rank."""
    return []


def made_like(call: OpCall) -> list[OpPlacements]:
    """new_zeros and its kind: the input lends its type alone, and may be cut; the output is whole."""
    dims = len(call.inputs[0].shape)
    return cut(call, [Axis((dim,), (None,), REPLICATE) for dim in range(dims)])


def register() -> None:
    """Register this file's rules."""
    register_all(CREATIONS, created)
    register_all(RANDOM, created)
    register_all(NEW, made_like)
