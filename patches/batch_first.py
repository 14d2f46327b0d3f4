"""Rows in torch's order, [batch, sequence, ...], while the operators cut the first dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_parallel.overlap.weight_gradient import (
    Begin,
    Product,
    WeightGradient,
    sum_over_rows,
)


class BatchFirstWeightGradient(WeightGradient):
    """Gradients of weight and bias whose sums run over the rows in the order of [batch, sequence], as torch's does."""

    def __init__(self, batch: int, begin: Begin | None = None) -> None:
        """Hold the size of the batch; rows come in the order of [sequence, batch]."""
        super().__init__(begin)
        self._batch = batch

    def compute(
        self,
        x_m: torch.Tensor,
        dy_m: torch.Tensor,
        out: torch.Tensor | None = None,
        product: Product | None = None,
    ) -> torch.Tensor | None:
        """Return ``dy_m.t() @ x_m`` [N, K] of rows that are put in order: x_m [M, K], dy_m [M, N]."""
        return super().compute(self._ordered(x_m), self._ordered(dy_m), out, product)

    def bias(self, dy_m: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = sum_over_rows) -> torch.Tensor:
        """Return the bias's gradient [N]: dy_m [M, N]."""
        return super().bias(self._ordered(dy_m), total)

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, self._batch, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.transpose(0, 1).contiguous()


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, ...] as contiguous [S, B, ...], or back; the gradient is contiguous, too.

    Reductions that follow, such as a norm's weight gradient, sum in an order that depends on the strides.
    """
    y: torch.Tensor = _Swap.apply(x)  # type: ignore[no-untyped-call]
    return y
