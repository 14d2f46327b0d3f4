"""A small decoder, and the plans with which torch's users parallelise one."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY = 480


class Attention(nn.Module):
    def __init__(self, hidden, heads, bias):
        super().__init__()
        self.width = hidden // heads
        self.wq, self.wk, self.wv = (nn.Linear(hidden, hidden, bias=bias) for _ in range(3))
        self.wo = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x):
        batch, rows = x.shape[:2]
        q, k, v = (
            linear(x).view(batch, rows, -1, self.width).transpose(1, 2) for linear in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, rows, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden, inner, bias):
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, inner, bias=bias), nn.Linear(hidden, inner, bias=bias)
        self.w2 = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden, inner, heads, bias):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, heads, bias), FeedForward(hidden, inner, bias)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, hidden=384, inner=1152, heads=12, layers=2, bias=False):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden, inner, heads, bias) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def decoder(dtype=torch.float32, **options):
    torch.manual_seed(3)
    model = Decoder(**options)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.02
    return model.to(dtype)


def parallel(model, mesh, plan):
    """Parallelise as "plain", "sequence" (torch's tutorial), or "layers": each column layer gathers for itself."""
    if plan == "plain":
        column, row = ColwiseParallel, RowwiseParallel
        for block in model.layers:
            names = {"wq": column(), "wk": column(), "wv": column(), "wo": row()}
            parallelize_module(block.attention, mesh, names)
            parallelize_module(block.feed_forward, mesh, {"w1": column(), "w2": row(), "w3": column()})
        return model
    ends = {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.layers:
        own = {"input_layouts": Shard(1)} if plan == "layers" else {}
        styles = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            **{f"attention.{name}": ColwiseParallel(**own) for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            **{f"feed_forward.{name}": ColwiseParallel(**own) for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        if plan == "sequence":
            styles = {"attention": gathered, "feed_forward": gathered, **styles}
        parallelize_module(block, mesh, styles)
    return model


def step(model, micro_batches=1, rows=(2, 96)):
    """Return the loss and every gradient, whole, of one training step."""
    from hugging_face import full_tensor

    model.zero_grad()
    for seed in range(micro_batches):
        ids = torch.randint(VOCABULARY, rows, generator=torch.Generator().manual_seed(seed))
        loss = F.cross_entropy(full_tensor(model(ids)).flatten(0, 1), ids.flatten())
        loss.backward()
    found = {
        name: full_tensor(each.grad).detach().clone()
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    return {"loss": loss.detach(), **found}
