"""The model of one_card.py with Paddle's words: marked by shard_layer, looked at eagerly, trained by to_static.

torchrun --nproc-per-node 4 examples/for_paddle_and_mindspore_users/as_in_paddle.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from one_card import batches, model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ascend_parallel.sharding import (
    ProcessMesh,
    Replicate,
    Shard,
    ShardingStage1,
    shard_dataloader,
    shard_layer,
    shard_optimizer,
    shard_tensor,
    unshard,
)
from ascend_parallel.training import Strategy, to_static

# torch's weights are [N, K], Paddle's are [K, N]: the columns that Paddle cuts by Shard(1) are Shard(0) here.
COLUMNS, ROWS = [Replicate(), Shard(0)], [Replicate(), Shard(1)]
CUTS = {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "o": ROWS, "up": COLUMNS, "down": ROWS}


def mark(path: str, module: nn.Module, mesh: ProcessMesh) -> None:
    """Cut the weights of a linear layer along mp, and a column layer's bias."""
    name = path.rpartition(".")[2]
    if name in CUTS:
        module.weight = shard_tensor(module.weight, mesh, CUTS[name])
        if CUTS[name] is COLUMNS:
            module.bias = shard_tensor(module.bias, mesh, COLUMNS)


def main() -> None:
    """Run one batch eagerly, then train by the graph, and print the losses."""
    dist.init_process_group("gloo")
    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    network = shard_layer(model(), mesh, mark)
    loader = shard_dataloader(batches(), mesh, "dp")
    optimizer = shard_optimizer(torch.optim.AdamW(network.parameters(), lr=1e-4), ShardingStage1("dp"))

    x, target = next(iter(loader))
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention of CPUs does not run on DTensors
        output = network(x)  # a DTensor: print it, take its norm, set a breakpoint in the forward
        eager = unshard(nn.functional.cross_entropy(output, target))
    show(f"eager   loss {eager.item():.12f}")

    strategy = Strategy(hardware="cpu-gloo")  # whose times decide what is not marked; by default an Ascend 910B's
    training = to_static(network, loader, nn.CrossEntropyLoss(), optimizer, strategy)
    show(training.step.explain())
    for step, (x, target) in enumerate(loader):
        show(f"step {step}  loss {training(x, target).item():.12f}")
    training.write_back()  # the marked model has the trained values
    training.close()
    dist.destroy_process_group()


def show(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
