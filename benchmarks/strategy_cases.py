"""Make the steps of benchmarks/strategy.py: torch's own parts, by hand, and by a strategy.

Each step takes the global batch, equal on every rank, steps the optimizer and returns the loss of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.training import Recompute, ShardingOptions, Strategy, train_step

EXAMPLES = Path(__file__).parents[1] / "examples" / "strategy"
sys.path.insert(0, str(EXAMPLES))

import by_hand  # noqa: E402
from by_hand import DATA, MICRO_BATCHES, PIPELINE, TENSOR  # noqa: E402
from gpt import GPT  # noqa: E402

Batch = tuple[torch.Tensor, torch.Tensor]
RANKS = PIPELINE * DATA * TENSOR


@dataclass(frozen=True)
class Step:
    """A training step: takes the global batch and returns its loss. `close` ends its threads."""

    run: Callable[[torch.Tensor, torch.Tensor], float]
    close: Callable[[], None] = lambda: None

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Train on the batch."""
        return self.run(tokens, targets)


class PartOfGPT(nn.Module):
    """The modules of one stage."""

    def __init__(self, model: GPT, stage: int) -> None:
        """Take the stage's modules from the model."""
        super().__init__()
        self.first, self.last = stage == 0, stage == PIPELINE - 1
        each = len(model.layers) // PIPELINE
        self.tokens, self.layers = model.tokens, model.layers[stage * each : (stage + 1) * each]
        if self.first:
            self.places = model.places
        if self.last:
            self.norm = model.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, or the logits in the last stage; `x` is tokens in the first stage."""
        if self.first:
            x = self.tokens(x) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight) if self.last else x


def mesh_of_all() -> DeviceMesh:
    """Return the mesh of the job, stage by stage."""
    return init_device_mesh("cpu", (PIPELINE, DATA, TENSOR), mesh_dim_names=("pipeline", "data", "tensor"))


def composed(model: GPT, batch: Batch, lr: float) -> Step:
    """Return the step of DTensor's tensor parallelism, fully_shard and torch's 1F1B schedule."""
    mesh = mesh_of_all()
    stage, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    part = PartOfGPT(model, stage)
    for layer in part.layers:
        layer.heads //= TENSOR
        styles = {"qkv": ColwiseParallel(), "o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], styles)
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)  # as torchtitan does with a pipeline
    fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
    schedule = Schedule1F1B(
        PipelineStage(part, stage, PIPELINE, torch.device("cpu"), group=group),
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )
    optimizer = torch.optim.AdamW(part.parameters(), lr=lr)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        mine = my_rows(mesh, len(tokens))
        if part.first:
            schedule.step(tokens[mine])
        else:
            schedule.step(target=targets[mine], losses=losses)
        dist.all_reduce(part.tokens.weight.grad.to_local(), group=group)  # tied
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss(torch.stack(losses).mean() if part.last else torch.zeros(()))

    return Step(step)


def hand_written(model: GPT, batch: Batch, lr: float) -> Step:
    """Return the step of examples/strategy/by_hand.py."""
    mesh = mesh_of_all()
    place = by_hand.Place(**{name: mesh.get_group(name) for name in ("pipeline", "data", "tensor")})
    stage = by_hand.Stage(model, place)
    schedule, optimizer = by_hand.Schedule1F1B(stage), torch.optim.AdamW(stage.parameters(), lr=lr)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        mine = my_rows(mesh, len(tokens))
        loss = schedule.step(tokens[mine], targets[mine])
        by_hand.reduce_gradients(stage)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss(loss)

    return Step(step)


def strategy_of_example() -> Strategy:
    """Return the strategy of gpt.toml without recompute and without a sharded optimizer, like the other cases."""
    strategy = Strategy.from_toml(EXAMPLES / "gpt.toml")
    return replace(strategy, recompute=Recompute(), sharding=ShardingOptions())


def my_rows(mesh: DeviceMesh, rows: int) -> slice:
    """Return this replica's rows of a batch."""
    each = rows // DATA
    start = mesh.get_local_rank("data") * each
    return slice(start, start + each)


def mean_loss(loss: torch.Tensor) -> float:
    """Return the loss of the batch on every rank; `loss` is 0 on ranks that do not compute it."""
    summed = loss.detach().double()
    dist.all_reduce(summed)
    return summed.item() / (DATA * TENSOR)


def by_strategy(model: GPT, batch: Batch, lr: float, chunks: int = 1) -> Step:
    """Return the step of a strategy with `chunks` chunks in each matmul next to a collective."""
    optimizer, settings = torch.optim.AdamW(model.parameters(), lr=lr), Settings(num_chunks=chunks)
    train = train_step(model, batch, optimizer, strategy_of_example(), settings=settings)
    return Step(lambda tokens, targets: train(tokens, targets).item(), train.close)


TORCH = "torch's parts (DTensor, fully_shard, Schedule1F1B)"
CASES: dict[str, Callable[[GPT, Batch, float], Step]] = {
    TORCH: composed,
    "by hand": hand_written,
    "strategy": by_strategy,
    "strategy, matmuls in 2 chunks": partial(by_strategy, chunks=2),
}
