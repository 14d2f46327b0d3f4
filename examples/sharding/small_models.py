"""Small models for examples and tests of sharding: Llama, GPT, BERT, a ResNet block with a head, two scans."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x with rotary position embedding."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key heads than query heads."""

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        angles = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, self.size, 2) / self.size)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin)
        repeats = self.heads // self.groups
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, wide: int) -> None:
        """Make the layers."""
        super().__init__()
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    """Attention and MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int, groups: int, wide: int, length: int) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), Attention(width, heads, groups, length)
        self.norm2, self.mlp = RMSNorm(width), SwiGLU(width, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Returns the mean loss of the next token; without targets, the logits."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 32,
        heads: int = 4,
        groups: int = 2,
        wide: int = 48,
        vocabulary: int = 64,
        length: int = 16,
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, wide, length) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layers."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPTLayer(nn.Module):
    """Attention and MLP with biases and dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Make the layers."""
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.o(y.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean loss of the next token; embedding and head are tied."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 32,
        heads: int = 4,
        vocabulary: int = 64,
        length: int = 16,
        dropout: float = 0.0,
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(GPTLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        x = self.tokens(tokens) + self.places(self.positions)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bert(nn.Module):
    """An encoder layer with masked attention by separate operators; returns the loss of a pooled classification."""

    def __init__(
        self, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, classes: int = 4
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.pool, self.classes = nn.Linear(width, width), nn.Linear(width, classes)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, tokens: torch.Tensor, present: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        batch, length = tokens.shape
        x = self.norm1(self.tokens(tokens) + self.places(self.positions))
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5)
        scores = scores.masked_fill(~present[:, None, None, :], -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.o(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.classes(torch.tanh(self.pool(x[:, 0]))), targets)


class ResNet(nn.Module):
    """A residual block (data parallel, as published), then a wide head (model parallel)."""

    def __init__(self, channels: int = 8, classes: int = 16) -> None:
        """Make the layers."""
        super().__init__()
        self.conv0 = nn.Conv2d(3, channels, 3, padding=1)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.wide, self.head = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, classes)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        x = F.relu(self.conv0(images))
        x = F.relu(x + self.conv2(F.relu(self.conv1(x))))
        x = x.mean((2, 3))
        return F.cross_entropy(self.head(F.relu(self.wide(x))), targets)


class Rwkv(nn.Module):
    """A linear-attention scan as RWKV writes it: every step reads receptance, key, value, decay and bonus."""

    def __init__(self, width: int = 512, heads: int = 8) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.r, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w, self.u = (nn.Parameter(torch.zeros(heads, width // heads, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs; x is ``[batch, steps, width]``."""
        batch, length, width = x.shape
        r, k, v = (each(x).view(batch, length, self.heads, -1) for each in (self.r, self.k, self.v))
        state = torch.zeros(batch, self.heads, width // self.heads, width // self.heads, device=x.device)
        decay, out = torch.exp(-torch.exp(self.w)), []
        for step in range(length):
            kv = k[:, step].unsqueeze(-1) * v[:, step].unsqueeze(-2)
            out.append((r[:, step].unsqueeze(-2) @ (state + self.u * kv)).squeeze(-2))
            state = state * decay + kv
        return self.o(torch.stack(out, 1).reshape(batch, length, width)).square().mean()


class Mamba(nn.Module):
    """A selective state space scan as Mamba writes it."""

    def __init__(self, width: int = 512, states: int = 16) -> None:
        """Make the layers."""
        super().__init__()
        self.x, self.dt = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width)
        self.bc, self.o = nn.Linear(width, 2 * states, bias=False), nn.Linear(width, width, bias=False)
        self.a, self.skip = nn.Parameter(torch.zeros(width, states)), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs; x is ``[batch, steps, width]``."""
        x, gate = self.x(x).chunk(2, -1)
        dt, (b, c) = F.softplus(self.dt(x)), self.bc(x).chunk(2, -1)
        a, state, out = -torch.exp(self.a), torch.zeros(*x.shape[::2], self.a.shape[1], device=x.device), []
        for step in range(x.shape[1]):
            entered = (dt[:, step] * x[:, step]).unsqueeze(-1) * b[:, step].unsqueeze(1)
            state = torch.exp(dt[:, step].unsqueeze(-1) * a) * state + entered
            out.append((state * c[:, step].unsqueeze(1)).sum(-1))
        return self.o((torch.stack(out, 1) + x * self.skip) * F.silu(gate)).square().mean()
