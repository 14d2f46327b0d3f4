"""A transformer's encoder that classifies sequences, and its training on one card.

python examples/for_paddle_and_mindspore_users/one_card.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, CLASSES, BATCH, STEPS = 512, 8, 16, 8, 16, 5


class FeedForward(nn.Module):
    """Two matmuls and an activation."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on ``[batch, length, width]``."""
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Every place attends to every place."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on ``[batch, length, width]``."""
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, a norm before each and the residual around it."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on ``[batch, length, width]``."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Classifier(nn.Module):
    """Two blocks, the mean over the sequence, and a head."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores for ``[batch, length, width]``."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def model() -> Classifier:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return Classifier().double()  # so that losses can be compared to the last digits


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the data: sequences around a centre for each class, and the classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, 1, WIDTH, generator=generator, dtype=torch.double)
    found = []
    for _ in range(STEPS):
        classes = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.double)
        found.append((centres[classes] + noise, classes))
    return found


def main() -> None:
    """Train, and print the losses."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    for step, (x, target) in enumerate(batches()):
        loss = F.cross_entropy(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.12f}")


if __name__ == "__main__":
    main()
