"""The four examples of MindSpore's guide to Sharding Propagation, in PyTorch, with their two configurations.

Each example has the model, its arguments on the meta device, the published manual configuration of every operator
(`manual`), and a short configuration from which propagation gives the same layouts (`minimal`). The mesh has the
dimensions dp and mp; context parallel is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Strategies = dict[str, object]


def matmul_transpose_b(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a [..., M, K] @ b [..., N, K].T."""
    return a @ b.transpose(-1, -2)


class Named(nn.Module):
    """A function as a module, so that patterns can name it like MindSpore's operators."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        """Take the function."""
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> torch.Tensor:
        """Return the function's result."""
        return self.function(*args)


def columns(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return x[:, start:stop]."""
    return x[:, start:stop]


def swap_heads(x: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, size] as [batch, length, heads, size], or back."""
    return x.transpose(1, 2)


class RowParallelLinear(nn.Module):
    """y [rows, N] = x [rows, K] @ weight [N, K].T + bias [N]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Take K and N."""
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(outputs, inputs)), nn.Parameter(torch.zeros(outputs))
        self.matmul, self.add = Named(matmul_transpose_b), Named(torch.add)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, N]."""
        return self.add(self.matmul(x, self.weight), self.bias)


class CoreAttention(nn.Module):
    """Attention by separate operators: [batch, heads, length, size] to [batch, length, heads * size]."""

    def __init__(self, size: int, dropout: float = 0.1) -> None:
        """Take a head's size."""
        super().__init__()
        self.scale = size**-0.5
        self.bmm_qk, self.mul, self.dropout = Named(matmul_transpose_b), Named(torch.mul), nn.Dropout(dropout)
        self.bmm_qkv, self.merge_head_transpose = Named(torch.matmul), Named(swap_heads)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs, concatenated."""
        scores = self.mul(self.bmm_qk(query, key), self.scale)
        read = self.bmm_qkv(self.dropout(scores.softmax(-1)), value)
        return self.merge_head_transpose(read).flatten(2)


class FlashAttention(nn.Module):
    """The fused attention operator; alibi [batch, heads, length, length] is rescaled and added to the scores."""

    def __init__(self, rescale: float = 0.5) -> None:
        """Take the factor of the alibi bias."""
        super().__init__()
        self.alibi_rescale_mul = Named(torch.mul)
        self.register_buffer("alibi_rescale_factor", torch.full((1,), rescale))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, alibi: torch.Tensor) -> torch.Tensor:
        """Return [batch, heads, length, size]."""
        mask = self.alibi_rescale_mul(alibi, self.alibi_rescale_factor)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Rotary(nn.Module):
    """Rotary position embedding of heads [batch, heads, length, size]."""

    def __init__(self, length: int, size: int) -> None:
        """Take the longest sequence and a head's size."""
        super().__init__()
        angles = torch.arange(length)[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, rotated."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions, [batch, length, width] to the same."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        """Take the sizes."""
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.rotary, self.transpose, self.merge_head_transpose = (
            Rotary(length, width // heads),
            Named(swap_heads),
            Named(swap_heads),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projected outputs of the heads."""
        query, key, value = (self.transpose(f(x).unflatten(-1, (self.heads, -1))) for f in (self.wq, self.wk, self.wv))
        read = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        return self.wo(self.merge_head_transpose(read).flatten(2))


class LlamaFeedForward(nn.Module):
    """A gated MLP: two projections up, one of them a gate, and a projection down."""

    def __init__(self, width: int, wide: int) -> None:
        """Take the sizes."""
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.w2 = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual addition after it."""

    def __init__(self, width: int, heads: int, wide: int, length: int) -> None:
        """Take the sizes."""
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = LlamaAttention(width, heads, length), LlamaFeedForward(width, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class LlamaModel(nn.Module):
    """Tokens [batch, length] to [batch, length, width]."""

    def __init__(self, layers: int, width: int, heads: int, wide: int, vocabulary: int, length: int) -> None:
        """Take the sizes."""
        super().__init__()
        self.tok_embeddings, self.norm_out = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, wide, length) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the normalised output of the last layer."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm_out(x)


class LlamaForCausalLM(nn.Module):
    """Returns the mean over all positions of the next token's loss, 0 for masked positions.

    ids [batch, length + 1], label_mask [batch, length]
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 4096,
        heads: int = 32,
        wide: int = 11008,
        vocabulary: int = 32000,
        length: int = 2048,
        pad: int = 0,
    ) -> None:
        """Take the sizes, and the id of the padding token."""
        super().__init__()
        self.length, self.pad = length, pad
        self.model = LlamaModel(layers, width, heads, wide, vocabulary, length)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.slice, self.not_equal, self.mul = Named(columns), Named(torch.ne), Named(torch.mul)

    def forward(self, ids: torch.Tensor, label_mask: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss."""
        tokens, labels = self.slice(ids, 0, self.length), self.slice(ids, 1, self.length + 1)
        mask = self.mul(self.not_equal(tokens, self.pad), label_mask)
        logits = self.lm_head(self.model(tokens))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).mean()


class Trained(nn.Module):
    """A layer with a scalar loss, which reads the layer's output in any layout."""

    def __init__(self, layer: nn.Module) -> None:
        """Take the layer."""
        super().__init__()
        self.layer = layer

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Return the mean of the output's squares."""
        return self.layer(*args).square().mean()


@dataclass(frozen=True)
class Example:
    """A model, the arguments of its forward, and its two configurations for a mesh of dp and mp."""

    model: nn.Module
    args: tuple[Any, ...]
    minimal: Strategies
    manual: Strategies


def row_parallel_linear() -> Example:
    """Return the example that configures the MatMul; the Add is propagated."""
    minimal: Strategies = {"layer.matmul:matmul": ([("dp", 1), (1, "mp")], None)}
    manual = {**minimal, "layer.add": ([("dp", "mp"), ("mp",)], None)}
    with torch.device("meta"):
        return Example(Trained(RowParallelLinear(4096, 4096)), (torch.zeros(8192, 4096),), minimal, manual)


def core_attention() -> Example:
    """Return the example that configures both matmuls and the merging transpose; Mul and Dropout are propagated."""
    cut = ("dp", "mp", 1, 1)
    minimal: Strategies = {
        "layer.bmm_qk:matmul": ([cut, cut], None),
        "layer.bmm_qkv": ([cut, cut], None),
        "layer.merge_head_transpose": ([cut], None),
    }
    manual = {**minimal, "layer.mul": ([cut], None), "layer.dropout": ([cut], None)}
    with torch.device("meta"):
        heads = torch.zeros(4, 32, 2048, 128)
        return Example(Trained(CoreAttention(128)), (heads, heads, heads), minimal, manual)


def flash_attention() -> Example:
    """Return the example that configures the attention operator; the Mul of the alibi bias is propagated."""
    cut = ("dp", "mp", 1, 1)
    minimal: Strategies = {"layer:scaled_dot_product_attention": ([cut] * 4, None)}
    manual = {**minimal, "layer.alibi_rescale_mul": ([cut, (1,)], None)}
    with torch.device("meta"):
        heads, alibi = torch.zeros(4, 32, 2048, 128), torch.zeros(4, 32, 2048, 2048)
        return Example(Trained(FlashAttention()), (heads, heads, heads, alibi), minimal, manual)


def llama() -> Example:
    """Return the example that configures the model; slice, comparison and mask around the model are propagated."""
    rows, norm = ("dp", 1, 1), ([("dp", 1, 1), (1,)], None)
    heads = ("dp", "mp", 1, 1)
    up, down = ([rows, ("mp", 1)], None), ([("dp", 1, "mp"), (1, "mp")], None)
    attention, feed_forward = "model.layers.*.attention", "model.layers.*.feed_forward"
    minimal: Strategies = {
        "model.tok_embeddings": ([(1, 1), ("dp", 1)], None),
        "model.layers.*.attention_norm": norm,
        **{f"{attention}.{name}": up for name in ("wq", "wk", "wv")},
        f"{attention}.transpose:transpose": ([("dp", 1, "mp", 1)], None),
        f"{attention}.rotary:chunk": ([heads], None),
        f"{attention}:scaled_dot_product_attention": ([heads] * 3, None),
        f"{attention}.merge_head_transpose": ([heads], None),
        f"{attention}.wo": down,
        "model.layers.*.ffn_norm": norm,
        **{f"{feed_forward}.{name}": up for name in ("w1", "w3")},
        f"{feed_forward}.w2": down,
        "model.norm_out": norm,
        "lm_head": up,
    }
    outside = {"slice:slice": ([("dp", 1)], None), "not_equal": ([("dp", 1)], None), "mul": ([("dp", 1)] * 2, None)}
    with torch.device("meta"):
        ids, label_mask = torch.zeros(4, 2049, dtype=torch.long), torch.ones(4, 2048)
        return Example(LlamaForCausalLM(), (ids, label_mask), minimal, {**minimal, **outside})


EXAMPLES = {
    "RowParallelLinear": row_parallel_linear,
    "CoreAttention": core_attention,
    "FlashAttention": flash_attention,
    "LlamaForCausalLM": llama,
}
