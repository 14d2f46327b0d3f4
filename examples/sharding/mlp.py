"""A block of a transformer's MLP, for a first look at a plan's instructions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    """``x + down(gelu(up(norm(x))))``."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return an MLP and its input, 8 sequences of 128 with 1024 features."""
    return MLP(1024), (torch.zeros(8, 128, 1024),)
