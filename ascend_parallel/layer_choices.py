"""What a layer's operators would be run with, forward and backward, told without running them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.registry import Choice, choose
from ascend_parallel.settings import Settings


@lru_cache(maxsize=64)
def column_backward_settings(settings: Settings) -> Settings:
    """Return what a column layer's backward runs with: without fused operators unless they are asked for.

    Unfused it still overlaps as Megatron-core does: the collective, whole, runs under the weight gradient.
    """
    if settings.fused and not settings.enable_coc_in_column_backward:
        return replace(settings, fused=False, num_chunks=1, customized_coc={}, mode=2)
    return settings


def column_choices(
    x: torch.Tensor, weight: torch.Tensor, ranks: int, sequence_parallel: bool, settings: Settings
) -> list[Choice]:
    """Tell how a column-parallel layer would run its operators, forward and backward, on x."""
    m, (n, k) = x.shape[:-1].numel(), weight.shape
    backward = column_backward_settings(settings)
    if not sequence_parallel:
        return _choices([(ALL_REDUCE, m, n, k)], x, ranks, backward)
    return [
        *_choices([(ALL_GATHER, m * ranks, k, n)], x, ranks, settings),
        *_choices([(REDUCE_SCATTER, m * ranks, n, k)], x, ranks, backward),
    ]


def row_choices(
    x: torch.Tensor, weight: torch.Tensor, ranks: int, sequence_parallel: bool, settings: Settings
) -> list[Choice]:
    """Tell how a row-parallel layer would run its operators, forward and backward, on x."""
    m, (n, k) = x.shape[:-1].numel(), weight.shape
    if not sequence_parallel:
        return _choices([(ALL_REDUCE, m, k, n)], x, ranks, settings)
    return _choices([(REDUCE_SCATTER, m, k, n), (ALL_GATHER, m, n, k)], x, ranks, settings)


def _choices(calls: list[tuple[str, int, int, int]], x: torch.Tensor, ranks: int, settings: Settings) -> list[Choice]:
    return [choose(Problem(*call, x.dtype, x.device.type, ranks), settings) for call in calls]
