"""Fused steps of optimizers."""

from typing import Any

import torch

from .table import kernel


def adamw(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, most: Any, grad: torch.Tensor, step: torch.Tensor,
    rate: float, beta1: float, beta2: float, decay: float, epsilon: float, amsgrad: bool, maximize: bool,
) -> None:  # fmt: skip
    """Update a weight and its moments; `step` counts the steps before this one."""
    count = step.item() + 1
    g = (-grad if maximize else grad).to(weight.dtype)
    weight.mul_(1 - rate * decay)
    first.lerp_(g.to(first.dtype), 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if amsgrad:
        torch.maximum(most, second, out=most)
    root = ((most if amsgrad else second).sqrt() / (1 - beta2**count) ** 0.5).add_(epsilon)
    weight.addcdiv_(first, root, value=-rate / (1 - beta1**count))


kernel("ApplyAdamWV2", "tttottfffffbb", adamw)
