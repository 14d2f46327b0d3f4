"""Rows in torch's order, [batch, sequence, ...], while the operators cut the first dimension."""

from __future__ import annotations

from typing import Any

import torch

from ascend_parallel.ops.arithmetic import Product, RowSum
from ascend_parallel.overlap.weight_gradient import Begin, WeightGradient


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
        """Return ``dw = dy_m.t() @ x_m`` [N, K], as `WeightGradient` does."""
        return super().compute(self._in_order(x_m), self._in_order(dy_m), out, product)

    def bias(self, dy_m: torch.Tensor, row_sum: RowSum | None = None) -> torch.Tensor:
        """Return the bias's gradient ``dy_m.sum(0)`` [N], as `WeightGradient` does."""
        return super().bias(self._in_order(dy_m), row_sum)

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
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
