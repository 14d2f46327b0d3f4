"""List a layer's operators and settings in forward and backward, without running them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.settings import Settings


@dataclass(frozen=True)
class LayerOperator:
    """An operator of a layer: its pass `run`, "forward" or "backward", and its matmul ``[m, k] x [k, n]``."""

    run: str
    operator: str
    m: int
    k: int
    n: int

    @property
    def layout(self) -> str:
        """The memory layout of the right operand: the weight [N, K] transposed in forward, row-major in backward."""
        return TRANSPOSED if self.run == "forward" else ROW_MAJOR


@lru_cache(maxsize=64)
def backward_settings(settings: Settings) -> Settings:
    """Return the settings of a layer's backward: with the plan's entries for backward."""
    return settings if settings.plan is None else replace(settings, plan=settings.plan.of("backward"))


@lru_cache(maxsize=64)
def column_backward_settings(settings: Settings) -> Settings:
    """Return the settings of a column layer's backward: fused only with `enable_coc_in_column_backward`.

    The unfused backward overlaps as Megatron-core's: the whole collective runs under the weight gradient.
    """
    if settings.fused and not settings.enable_coc_in_column_backward:
        return replace(settings, fused=False, num_chunks=1, customized_coc={}, plan=None, mode=2)
    return backward_settings(settings)


def column_operators(m: int, k: int, n: int, ranks: int, sequence_parallel: bool) -> list[LayerOperator]:
    """Return the operators of a column-parallel layer with weight [n, k] and m input rows on each rank."""
    if not sequence_parallel:
        return [LayerOperator("backward", ALL_REDUCE, m, n, k)]
    return [
        LayerOperator("forward", ALL_GATHER, m * ranks, k, n),
        LayerOperator("backward", REDUCE_SCATTER, m * ranks, n, k),
    ]


def row_operators(m: int, k: int, n: int, ranks: int, sequence_parallel: bool) -> list[LayerOperator]:
    """Return the operators of a row-parallel layer with weight [n, k] and m input rows on each rank."""
    if not sequence_parallel:
        return [LayerOperator("forward", ALL_REDUCE, m, k, n)]
    return [LayerOperator("forward", REDUCE_SCATTER, m, k, n), LayerOperator("backward", ALL_GATHER, m, n, k)]


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a layer multiplies x: autocast's dtype if autocast applies to x, else x's dtype."""
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def cast_by_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x cast as autocast casts matmul operands; cast before the collective, which then moves fewer bytes."""
    dtype = operand_dtype(x)
    return x if dtype == x.dtype else x.to(dtype)
