"""Forward wrappers of overlapped layers, for selective recompute."""

from __future__ import annotations

from collections.abc import Callable

import torch

Products = tuple[torch.Tensor, torch.Tensor | None]
"""A layer's output, and the gathered input that its backward needs, if the layer keeps it."""
ForwardWrapper = Callable[[Callable[[], Products]], Products]
"""``forward_wrapper(forward)`` runs `forward`, or returns its saved products during recompute."""


def run_directly(forward: Callable[[], Products]) -> Products:
    """Return ``forward()``."""
    return forward()
