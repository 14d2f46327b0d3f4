"""Attention of DTensors on the CPU, which torch runs on accelerators alone: cut along samples or heads, or whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten
Sharding = tuple[list[Placement | None], list[Placement | None]]
SAMPLES, HEADS = 0, 1  # dimensions of queries, keys and values


@cache
def register_attention_shardings() -> None:
    """Register the shardings with DTensor, in this process."""
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_backward)


def _forward(*args: Any, **options: Any) -> list[Sharding]:
    """Return the shardings of (output, log-sum-exp) for query, key, value, dropout and causality."""
    return [_sharding(each, 2, args, options) for each in _placements(args[:3], options)]


def _backward(*args: Any, **options: Any) -> list[Sharding]:
    """Return the shardings of the three gradients for the gradient above, query, key, value, output and log-sum-exp."""
    return [_sharding(each, 3, args, options) for each in _placements(args[1:4], options)]


def _sharding(placement: Placement, results: int, args: tuple[Any, ...], options: dict[str, Any]) -> Sharding:
    """Return a sharding in which all results and arguments have one placement; a mask is whole."""
    inputs: list[Placement | None] = [placement if hasattr(argument, "placements") else None for argument in args]
    return [placement] * results, inputs + [Replicate()] * (_mask(options) is not None)


def _placements(tensors: tuple[Any, ...], options: dict[str, Any]) -> list[Placement]:
    """Return the placements that these tensors may share; a mask and dropout need whole tensors."""
    found: list[Placement] = [Replicate()]
    if _mask(options) is not None:
        return found
    return found + [Shard(dim) for dim in (SAMPLES, HEADS) if len({tensor.shape[dim] for tensor in tensors}) == 1]


def _mask(options: dict[str, Any]) -> Any:
    return options.get("attn_mask")
