"""The destination of a layer's weight gradient."""

from __future__ import annotations

import torch


class WeightGradient:
    """Returns the weight gradient to autograd; frameworks derive from this class to accumulate elsewhere."""

    def begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Backward starts with `kept` (x or its gathered rows) and `weight`, each None if it is not needed."""

    def postpone(self, dy: torch.Tensor) -> bool:
        """Keep dy for later and return True, or return False to compute the gradient in this backward."""
        return False

    def placeholder(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that autograd gets in place of a postponed gradient; x is the layer's input."""
        return None

    def compute(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> torch.Tensor | None:
        """Return ``dw = dy_m.t() @ x_m`` [N, K], or None if it was accumulated elsewhere: x_m [M, K], dy_m [M, N]."""
        return dy_m.t().matmul(x_m)
