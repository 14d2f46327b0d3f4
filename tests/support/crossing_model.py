"""What tests of pipelines share: a model whose tensors cross stages in every way there is, and its stages."""

import torch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.mesh import ProcessMesh

STAGES = {"first": 0, "second": 1, "third": 2}


class Last(nn.Module):
    """Reads what the first and the second stage give."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, middle, left, kept, scale):
        return self.linear((middle + left * kept) * scale).squeeze(-1)


class Crossing(nn.Module):
    """Three stages: several tensors across a border, some that skip a stage, a mask, parameters in all of them."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(width, 2 * width), nn.Linear(width, width), Last(width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.frozen = nn.Parameter(torch.linspace(1.5, 0.5, width), requires_grad=False)

    def forward(self, x, present, targets):
        left, right = self.first(x * self.scale * self.frozen).chunk(2, dim=-1)  # right is a second output
        kept = left > 0  # has no gradient
        middle = torch.tanh(self.second(left)) * self.scale * self.frozen + right
        middle = middle.reshape(2, -1, left.shape[-1]).flatten(0, 1)  # what the second stage gives is a view
        return F.mse_loss(self.third(middle, left, kept, self.scale) * present, targets)


def crossing_batch(rows, generator):
    """Inputs, a mask, targets."""
    x = torch.randn(rows, 8, dtype=torch.float64, generator=generator)
    present = torch.rand(rows, dtype=torch.float64, generator=generator) < 0.8
    return x, present, torch.randn(rows, dtype=torch.float64, generator=generator)


def lines(ranks, groups):
    """Meshes of one dimension."""
    return [ProcessMesh(part, ["mp"]) for part in torch.arange(ranks).chunk(groups)]
