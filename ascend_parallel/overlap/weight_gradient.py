"""Where a layer's weight gradient goes."""

from __future__ import annotations

import torch


class WeightGradient:
    """What becomes of a weight gradient; frameworks derive from it to accumulate it elsewhere."""

    def begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Look at what backward begins with: x or its gathered rows, and the weight, each None if it is not needed."""

    def postpone(self, dy: torch.Tensor) -> bool:
        """Keep dy for later and return True, or return False to have the gradient computed now."""
        return False

    def placeholder(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what autograd gets for a gradient that was put off; x is the layer's input."""
        return None

    def compute(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient ``dY' X`` [N, K] of rows x [M, K] and dy [M, N], or None if it went elsewhere."""
        return dy_m.t().matmul(x_m)
