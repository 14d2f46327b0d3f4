"""A small GPT and its training on one card: the start of the tutorial and of the two distributed programs.

python examples/strategy/gpt.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 16, 10


class Layer(nn.Module):
    """Causal attention and an MLP, norms before them."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer on ``[batch, length, width]``."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and place embeddings, layers, and a head tied to the token embedding."""

    def __init__(
        self, layers: int = 4, width: int = 32, heads: int = 4, vocabulary: int = VOCABULARY, length: int = LENGTH
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token; both ``[batch, length]``."""
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of a step: consecutive numbers from a random start below 8, seeded by `step`."""
    starts = torch.randint(8, (size, 1), generator=torch.Generator().manual_seed(step))
    counted = starts + torch.arange(LENGTH + 1)
    return counted[:, :-1], counted[:, 1:]


def main() -> list[float]:
    """Train on one card; return the losses."""
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(*batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()
