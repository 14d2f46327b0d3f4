"""Train a small single-device Llama on several processes, from the strategies of a few operators in llama.toml.

    torchrun --nproc-per-node 2 examples/sharding/llama.py
    ascend-parallel propagate examples/sharding/llama.py:small --mesh mp=8 --config examples/sharding/llama.toml

Every rank also trains the whole model by itself, and the losses are compared.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import Llama

from ascend_parallel import Settings
from ascend_parallel.sharding import ProcessMesh, ShardedModule, explain, propagate, read_strategies, trace

STRATEGIES = Path(__file__).with_name("llama.toml")
STEPS = 10
SETTINGS = Settings(num_chunks=4)


def small() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model with the dimensions of real layers, and its arguments, for the command."""
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    model = Llama(layers=2, width=4096, heads=32, groups=8, wide=14336, vocabulary=128256, length=4096)
    return model.bfloat16(), (tokens, tokens)


def large() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return the model of `small` with a batch for 128 replicas."""
    model, (tokens, _) = small()
    batch = tokens.expand(128, -1)
    return model, (batch, batch)


def main() -> int:
    """Train the sharded and the whole model; return 0 if their losses agree."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Llama(width=64 * ranks, heads=8 * ranks, groups=ranks, wide=96 * ranks, vocabulary=512, length=60).double()
    tokens = torch.randint(512, (2, 61))
    batch = tokens[:, :-1], tokens[:, 1:]

    mesh = ProcessMesh(list(range(ranks)), ["mp"])
    plan = propagate(trace(model, batch), mesh, read_strategies(STRATEGIES), objective="redistribution")
    sharded = ShardedModule(model, plan, settings=SETTINGS)
    losses, expected = train(sharded, batch), train(model, batch)
    worst = max(abs(loss / whole - 1) for loss, whole in zip(losses, expected, strict=True))
    if rank == 0:
        print("\n".join(explain(plan).splitlines()[:3]))
        overlapped = [fusion for fusion in sharded.fused if fusion.operator]
        print(f"{len(overlapped)} of {len(sharded.fused)} matmuls next to a collective run overlapped")
        print(f"losses {losses[0]:.6f} ... {losses[-1]:.6f}; whole model {expected[0]:.6f} ... {expected[-1]:.6f}")
        print(f"largest difference {worst:.1e}")
    dist.destroy_process_group()
    return int(worst > 1e-9)


def train(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> list[float]:
    """Run `STEPS` steps of AdamW and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node 2 examples/sharding/llama.py")
    sys.exit(main())
