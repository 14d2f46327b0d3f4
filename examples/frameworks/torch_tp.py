"""Train a small decoder with torch's parallelize_module.

torchrun --nproc-per-node 2 examples/frameworks/torch_tp.py
COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/torch_tp.py --sequence-parallel --dtype bfloat16
COC_PARALLEL_NUM=4 torchrun --nproc-per-node 4 examples/frameworks/torch_tp.py --sequence-parallel --fsdp
COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/torch_tp.py --sequence-parallel --lora 8
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from results import Results, dtype_of, gradients_of, options, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

args = options(__doc__, sequence_parallel=False, fsdp=False, checkpoint=False, lora=0)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        """Make the four projections."""
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(args.hidden, args.hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: x [B, S, hidden]."""
        batch, rows = x.shape[:2]
        heads = (
            each(x).view(batch, rows, -1, args.hidden // args.heads).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, rows, -1))


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        """Make the three matrices."""
        super().__init__()
        self.gate, self.up = (nn.Linear(args.hidden, args.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(args.inner, args.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run: x [B, S, hidden]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(args.hidden), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(args.hidden), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run: x [B, S, hidden]."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.hidden)
        self.layers = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.hidden), nn.Linear(args.hidden, args.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, S, vocabulary]: ids [B, S]."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if args.checkpoint else layer(x)
        return self.head(self.norm(x))


def parallelise(model: Decoder, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
    """Shard every layer over `mesh`, as torch's tutorial does."""
    layer = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    if args.sequence_parallel:
        rows = Shard(1)
        gathers = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        scatters = RowwiseParallel(output_layouts=rows)
        layer |= {"norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": gathers, "mlp": gathers}
        layer |= {"attention.o": scatters, "mlp.down": scatters}
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    for block in model.layers:
        parallelize_module(block, mesh, layer)


class LoRALinear(nn.Linear):
    """A frozen layer and an adapter of low rank, as torchtitan writes it."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output and the adapter's."""
        return super().forward(x) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model: Decoder, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
    """Train adapters of rank --lora alone: every linear layer of a decoder layer gets one."""
    model.requires_grad_(requires_grad=False)
    for layer in [layer for layer in model.layers.modules() if isinstance(layer, nn.Linear)]:
        layer.__class__ = LoRALinear
        column = layer.weight.placements == (Shard(0),)
        a, b = (Replicate(), Shard(0)) if column else (Shard(1), Replicate())
        down = torch.randn(args.lora, layer.in_features, dtype=layer.weight.dtype) / layer.in_features**0.5
        up = torch.randn(layer.out_features, args.lora, dtype=layer.weight.dtype) * 0.02
        layer.lora_a = nn.Parameter(distribute_tensor(down, mesh, [a]))
        layer.lora_b = nn.Parameter(distribute_tensor(up, mesh, [b]))


def main() -> None:
    """Train some steps."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if args.fsdp else (1, ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Decoder().to(dtype_of(args))
    parallelise(model, mesh["tp"])
    if args.lora:
        add_adapters(model, mesh["tp"])
    if args.fsdp:
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    results = Results()
    for step in range(args.steps):
        ids = tokens(args, step)
        logits = model(ids)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        results.add(loss, gradients_of(model))
        optimizer.step()
    results.write(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
