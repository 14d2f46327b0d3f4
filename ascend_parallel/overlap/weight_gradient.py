"""The destination of a layer's weight gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_parallel.ops.arithmetic import Product, RowSum
from ascend_parallel.ops.record import MATMUL, compute

Begin = Callable[[torch.Tensor | None, torch.Tensor | None], None]
"""Called when backward starts, with what it keeps of x (x or its gathered rows) and the weight; None if not needed."""


class GradientParts:
    """Sums a weight gradient over parts of the rows, in fp32, or in float64 for such operands.

    The product of a part has the operands' dtype: 16-bit operands round it once for each part.
    """

    def __init__(self) -> None:
        """Hold no part yet."""
        self._total: torch.Tensor | None = None
        self._dtype = torch.float32

    def add(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> None:
        """Add ``dy_m.t() @ x_m`` [N, K]: x_m [m, K], dy_m [m, N], the same rows of both."""
        compute(MATMUL, "weight gradient", self._add, x_m, dy_m)

    def _add(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> None:
        if self._total is None:
            self._dtype = x_m.dtype
            summed = torch.promote_types(x_m.dtype, torch.float32)
            self._total = x_m.new_zeros(dy_m.shape[1], x_m.shape[1], dtype=summed)
        if self._total.dtype == x_m.dtype:
            self._total.addmm_(dy_m.t(), x_m)
        else:
            self._total.add_(dy_m.t() @ x_m)

    @property
    def begun(self) -> bool:
        """Tell whether a part was added."""
        return self._total is not None

    def total(self) -> torch.Tensor | None:
        """Return the sum in the operands' dtype, or None if it was accumulated elsewhere."""
        return None if self._total is None else self._total.to(self._dtype)


class WeightGradient:
    """Returns the weight gradient to autograd; frameworks derive from this class to accumulate elsewhere.

    begin
        Observes the start of the backward of a call that is checked; None for other calls.
    """

    begin: Begin | None = None  # of classes that derive from this without calling its constructor

    def __init__(self, begin: Begin | None = None) -> None:
        """Hold what observes the backward."""
        self.begin = begin

    def postpone(self, dy: torch.Tensor) -> bool:
        """Keep dy for later and return True, or return False to compute the gradient in this backward."""
        return False

    def placeholder(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that autograd gets in place of a postponed gradient; x is the layer's input."""
        return None

    @property
    def is_product(self) -> bool:
        """Whether `compute`, a product returned to autograd, and `bias` are this class's; derived ones may say so."""
        return type(self) is WeightGradient

    @property
    def may_come_later(self) -> bool:
        """Whether `compute` changes nothing but its result, which autograd may then get unfinished."""
        return True

    def compute(
        self,
        x_m: torch.Tensor,
        dy_m: torch.Tensor,
        out: torch.Tensor | None = None,
        product: Product | None = None,
    ) -> torch.Tensor | None:
        """Return ``dw = dy_m.t() @ x_m`` [N, K], or None if it was accumulated elsewhere: x_m [M, K], dy_m [M, N].

        out: where to write dw, if it `may_come_later`. product: the arithmetic's, or None for one matmul.
        """
        if product is not None:
            return product(x_m, dy_m) if out is None else out.copy_(product(x_m, dy_m))
        return dy_m.t().matmul(x_m) if out is None else torch.mm(dy_m.t(), x_m, out=out)

    def bias(self, dy_m: torch.Tensor, row_sum: RowSum | None = None) -> torch.Tensor:
        """Return the bias's gradient ``dy_m.sum(0)`` [N]: dy_m [M, N]. row_sum: the arithmetic's, as in `compute`."""
        return dy_m.sum(dim=0) if row_sum is None else row_sum(dy_m)

    def parts(self) -> GradientParts:
        """Return the function that sums this backward's gradient part by part, in place of `compute`."""
        return GradientParts()
