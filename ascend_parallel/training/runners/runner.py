"""What a training step needs of what runs forward and backward, and what all of those share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ascend_parallel.sharding.grad_dtype import accumulate_wide
from ascend_parallel.sharding.runtime.evaluation_graph import in_evaluation
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss, Losses
from ascend_parallel.training.optimizer.targets import Target
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import TrainingPlan, evaluating, rows_of_part


class Runner(Protocol):
    """What a training step needs of it."""

    @property
    def unreduced(self) -> bool:
        """Whether the optimizer sums gradients over its replicas itself."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """This rank's part of the model."""

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``, of sums where the loss counts. `last`: of those between steps."""

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode; no gradient is touched."""

    def finish(self) -> None:
        """Sum what has to be whole before the optimizer steps."""

    def clear(self) -> None:
        """Drop all gradients."""

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's part of parameters and buffers."""


def take_evaluation(planned: TrainingPlan, modules: Sequence[ShardedModule]) -> None:
    """Have modules run in evaluation mode what stands for what was traced in training, once it is checked to be that.

    Raises as `TrainingPlan.check_evaluation`, on all ranks alike.
    """
    if not planned.plan.graph.training or all(module.evaluation is not None for module in modules):
        return
    planned.check_evaluation()
    for module in modules:
        module.evaluation = in_evaluation(module.plan.graph)


def loss_of(run: Callable[..., Any], modules: Sequence[nn.Module], batch: Sequence[Any], count: int) -> torch.Tensor:
    """Return the mean loss of a batch in `count` micro-batches with the modules in evaluation mode."""
    losses = Losses(count)
    with torch.no_grad(), evaluating(modules):
        for number in range(count):
            losses.add(run(*(part_of(one, number, count) for one in batch)))
    return losses.batch().mean


def part_of(one: Any, number: int, count: int) -> Any:
    """Return the `number`-th of `count` micro-batches of a batch's tensor."""
    if not isinstance(one, torch.Tensor) or count == 1:
        return one
    rows = rows_of_part(one, count)
    return one[number * rows : (number + 1) * rows]


def keep_gradients(parameters: Iterable[nn.Parameter], strategy: Strategy) -> None:
    """Have gradients of 16 bits add up in fp32 where several backwards come before a step of the optimizer."""
    if strategy.backwards > 1:
        accumulate_wide(parameters)


def divided_over(strategy: Strategy) -> str | None:
    """Return the mesh dimension whose ranks share the optimizer's work; None if nobody does."""
    return strategy.sharding.dim if strategy.sharding.zero_stage else None
