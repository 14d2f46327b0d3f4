"""A transformer of given dimensions, to trace: the presets of the cost model have no module of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.rules.experts import mixture_of_experts
from ascend_parallel.tuning.cost_model.models import Model

# Vocabularies are padded to a multiple of this, as Megatron-LM does by default (--make-vocab-size-divisible-by 128).
VOCABULARY_MULTIPLE = 128


class Transformer(nn.Module):
    """A decoder-only transformer that returns the mean loss of the next token; its blocks are ``layers.*``.

    Biases and LayerNorm if the model has biases, else RMSNorm. Without learned positions, queries and keys are rotated.
    """

    def __init__(self, model: Model, length: int, layers: int | None = None) -> None:
        """Make the modules for sequences of `length`, with `layers` layers instead of the model's."""
        super().__init__()
        vocabulary = -(-model.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        self.embedding = nn.Embedding(vocabulary, model.hidden)
        self.places = nn.Embedding(length, model.hidden) if model.positions else None
        count = model.layers if layers is None else layers
        dense = model.layers - model.sparse_layers
        self.layers = nn.ModuleList(_Layer(model, length, sparse=layer >= dense) for layer in range(count))
        self.norm = _norm(model, model.hidden)
        self.head = None if model.tied else nn.Linear(model.hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; both ``[sequences, length]``."""
        x = self.embedding(tokens)
        if self.places is not None:
            x = x + self.places.weight
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Layer(nn.Module):
    """Attention and MLP, or experts, each with a norm before it and a residual around it."""

    def __init__(self, model: Model, length: int, *, sparse: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(model, model.hidden), _norm(model, model.hidden)
        self.attention: nn.Module = _LatentAttention(model, length) if model.latent else _Attention(model, length)
        self.mlp: nn.Module = _Experts(model) if sparse else _Mlp(model, model.ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class _Attention(nn.Module):
    """Causal attention; several query heads may share a key head."""

    def __init__(self, model: Model, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads, model.kv_heads
        self.q = nn.Linear(model.hidden, model.heads * model.head_dim, bias=model.bias)
        self.k = nn.Linear(model.hidden, model.kv_heads * model.head_dim, bias=model.bias)
        self.v = nn.Linear(model.hidden, model.kv_heads * model.value_dim, bias=model.bias)
        self.o = nn.Linear(model.heads * model.value_dim, model.hidden, bias=model.bias)
        self.rotary = None if model.positions else _Rotary(length, model.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(self.q(x), self.heads), _heads(self.k(x), self.kv_heads), _heads(self.v(x), self.kv_heads)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.kv_heads < self.heads:
            repeats = self.heads // self.kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(_joined(y))  # type: ignore[no-any-return]


class _LatentAttention(nn.Module):
    """Latent attention (DeepSeek): queries, keys and values from short vectors; one rotated key for all heads."""

    def __init__(self, model: Model, length: int) -> None:
        super().__init__()
        self.heads, self.kv_rank, self.rotary_dim = model.heads, model.kv_rank, model.rotary_dim
        self.keys, self.values = model.head_dim - model.rotary_dim, model.value_dim
        self.q_down = nn.Linear(model.hidden, model.q_rank, bias=False)
        self.q_up = nn.Linear(model.q_rank, model.heads * model.head_dim, bias=False)
        self.kv_down = nn.Linear(model.hidden, model.kv_rank + model.rotary_dim, bias=False)
        self.kv_up = nn.Linear(model.kv_rank, model.heads * (self.keys + self.values), bias=False)
        self.q_norm, self.kv_norm = _norm(model, model.q_rank), _norm(model, model.kv_rank)
        self.o = nn.Linear(model.heads * model.value_dim, model.hidden, bias=False)
        self.rotary = _Rotary(length, model.rotary_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = _heads(self.q_up(self.q_norm(self.q_down(x))), self.heads)
        q, q_rotated = torch.split(q, [self.keys, self.rotary_dim], dim=-1)
        short, rotated = torch.split(self.kv_down(x), [self.kv_rank, self.rotary_dim], dim=-1)
        k, v = torch.split(_heads(self.kv_up(self.kv_norm(short)), self.heads), [self.keys, self.values], dim=-1)
        shared = self.rotary(rotated.unsqueeze(1)).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q, self.rotary(q_rotated)), dim=-1), torch.cat((k, shared), dim=-1)
        return self.o(_joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    """A gated MLP, or an MLP with gelu."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, width, bias=model.bias) if model.gated else None
        self.up = nn.Linear(model.hidden, width, bias=model.bias)
        self.down = nn.Linear(width, model.hidden, bias=model.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(y)  # type: ignore[no-any-return]


class _Experts(nn.Module):
    """A mixture of experts: each token passes the experts of the largest scores, and a shared one if there is any."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        into, out = (model.experts, model.expert_ffn, model.hidden), (model.experts, model.hidden, model.expert_ffn)
        self.top_k, self.activation = model.top_k, "silu" if model.gated else "gelu"
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(into)) if model.gated else None
        self.up, self.down = nn.Parameter(torch.empty(into)), nn.Parameter(torch.empty(out))
        self.shared = _Mlp(model, model.shared_ffn) if model.shared_ffn else None
        for weight in (self.gate, self.up, self.down):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(x).softmax(-1).topk(self.top_k)
        y = mixture_of_experts(x, index, weight, self.up, self.down, self.gate, activation=self.activation)
        return y if self.shared is None else y + self.shared(x)


class _Rotary(nn.Module):
    """Rotary position embedding of ``[sequences, heads, length, size]``."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


def _norm(model: Model, width: int) -> nn.Module:
    return nn.LayerNorm(width) if model.bias else nn.RMSNorm(width, eps=1e-5)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)
