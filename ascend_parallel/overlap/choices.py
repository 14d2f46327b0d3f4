"""What a layer's operators would be run with, forward and backward, told without running them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.settings import Settings


@dataclass(frozen=True)
class LayerOperator:
    """One operator of a layer: in which pass it runs, "forward" or "backward", and its matmul ``[m, k] x [k, n]``."""

    run: str
    operator: str
    m: int
    k: int
    n: int

    @property
    def layout(self) -> str:
        """How the right operand lies: the weight [N, K] transposed in forward, as it is in backward."""
        return TRANSPOSED if self.run == "forward" else ROW_MAJOR


@lru_cache(maxsize=64)
def backward_settings(settings: Settings) -> Settings:
    """Return what a layer's backward runs with: the plan's entries for backward."""
    return settings if settings.plan is None else replace(settings, plan=settings.plan.of("backward"))


@lru_cache(maxsize=64)
def column_backward_settings(settings: Settings) -> Settings:
    """Return what a column layer's backward runs with: without fused operators unless they are asked for.

    Unfused it still overlaps as Megatron-core does: the collective, whole, runs under the weight gradient.
    """
    if settings.fused and not settings.enable_coc_in_column_backward:
        return replace(settings, fused=False, num_chunks=1, customized_coc={}, plan=None, mode=2)
    return backward_settings(settings)


def column_passes(m: int, k: int, n: int, ranks: int, sequence_parallel: bool) -> list[LayerOperator]:
    """Return the operators of a column-parallel layer of weight [n, k] on m rows of one rank's input."""
    if not sequence_parallel:
        return [LayerOperator("backward", ALL_REDUCE, m, n, k)]
    return [
        LayerOperator("forward", ALL_GATHER, m * ranks, k, n),
        LayerOperator("backward", REDUCE_SCATTER, m * ranks, n, k),
    ]


def row_passes(m: int, k: int, n: int, ranks: int, sequence_parallel: bool) -> list[LayerOperator]:
    """Return the operators of a row-parallel layer of weight [n, k] on m rows of one rank's input."""
    if not sequence_parallel:
        return [LayerOperator("forward", ALL_REDUCE, m, k, n)]
    return [LayerOperator("forward", REDUCE_SCATTER, m, k, n), LayerOperator("backward", ALL_GATHER, m, n, k)]


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a layer multiplies x: autocast's, where it is on for it."""
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
