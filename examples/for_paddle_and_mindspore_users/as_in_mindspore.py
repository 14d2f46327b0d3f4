"""The model of one_card.py with MindSpore's words: strategies of the blocks' matmuls, the rest propagated.

torchrun --nproc-per-node 4 examples/for_paddle_and_mindspore_users/as_in_mindspore.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from one_card import BATCH, LENGTH, WIDTH, Classifier, batches, model
from torch import nn

from ascend_parallel.sharding import shard
from ascend_parallel.training import Strategy, train_step

# A linear layer reads its input [batch, length, K], its weight [N, K] and its bias [N].
COLUMNS, ROWS = [("dp", 1, 1), ("mp", 1), ("mp",)], [("dp", 1, "mp"), (1, "mp"), None]


def configured() -> Classifier:
    """Return the model with the strategies of its blocks' matmuls, as `self.matmul.shard(in_strategy)` sets them."""
    network = model()
    for layer in network.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        for matmul in (attention.q, attention.k, attention.v, feed_forward.up):
            shard(matmul, in_strategy=COLUMNS)
        for matmul in (attention.o, feed_forward.down):
            shard(matmul, in_strategy=ROWS)
    return network


def loss_of(network: Classifier, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, as `nn.WithLossCell` computes it."""
    return nn.functional.cross_entropy(network(x), target)


def planned() -> tuple[Classifier, tuple[torch.Tensor, torch.Tensor], Callable[..., torch.Tensor]]:
    """Return model, batch and loss for the command `ascend-parallel strategy`, which needs shapes alone."""
    batch = torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.double), torch.zeros(BATCH, dtype=torch.long)
    return configured(), batch, loss_of


def main() -> None:
    """Train, and print what was propagated, and the losses."""
    dist.init_process_group("gloo")
    network, data = configured(), batches()
    strategy = Strategy.from_toml(Path(__file__).with_name("strategy.toml"))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    training_step = train_step(network, data[0], optimizer, strategy, loss=loss_of)
    show(training_step.explain(operators=True))
    for step, batch in enumerate(data):
        show(f"step {step}  loss {training_step(*batch).item():.12f}")
    training_step.close()
    dist.destroy_process_group()


def show(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
