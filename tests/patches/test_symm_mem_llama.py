"""A Llama-like model, sequence parallel in torch's usual plan, compiled with the kernels: against one card."""

import copy

import pytest
import torch
from compiling import compiling, fresh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import ascend_parallel
from ascend_parallel.ops import COUNTS

HIDDEN, HEADS, SIZE, WORDS, LENGTH = 96, 12, 8, 96, 96  # divisible by 2 ranks; rows for two chunks
GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (
            linear(HIDDEN, HEADS * SIZE),
            linear(HIDDEN, HEADS * SIZE),
            linear(HIDDEN, HEADS * SIZE),
        )
        self.o = linear(HEADS * SIZE, HIDDEN)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = linear(HIDDEN, 192), linear(HIDDEN, 192), linear(192, HIDDEN)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.RMSNorm(HIDDEN), Gated()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = nn.RMSNorm(HIDDEN), linear(HIDDEN, WORDS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel(model, mesh):
    """Cut the model in the plan of torchtitan's Llama: norms along the sequence, a gather before each block's part."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    for block in model.blocks:
        parts = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": GATHERED, "mlp": GATHERED}
        parts |= {f"attention.{name}": columns for name in "qkv"} | {"attention.o": rows}
        parts |= {"mlp.gate": columns, "mlp.up": columns, "mlp.down": rows}
        parallelize_module(block, mesh, parts)
    return parallelize_module(model, mesh, plan)


def results(model, run, tokens):
    """Return the logits and every gradient, whole."""
    logits = run(tokens)
    logits.square().mean().backward()
    found = [logits.detach(), *(parameter.grad for parameter in model.parameters())]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def compiled(group, tag):
    torch.manual_seed(0)
    whole = Llama().double()
    model = parallel(copy.deepcopy(whole), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)))
    tokens = torch.randint(WORDS, (2, LENGTH))
    expected = results(whole, whole, tokens)
    with compiling(tag):
        ascend_parallel.register_symm_mem()
        COUNTS.clear()
        found = results(model, torch.compile(model), tokens)
        counts = COUNTS.as_dict()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)
    return {operator: (total["calls"], total["chunks"] > total["calls"]) for operator, total in counts.items()}


@pytest.mark.slow
def test_a_compiled_llama_is_that_of_one_card(ranks):
    """Gathers: q, k, v and gate, up of a block and the head, and before the gradients of o and down; no fusion of
    sums of products before a scatter, so the scatters are those of o and down, and the head's gradient."""
    for counts in ranks(2).run(compiled, fresh()):
        assert counts == {"all_gather_matmul": (5, True), "matmul_reduce_scatter": (3, True)}
