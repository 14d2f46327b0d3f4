"""The base class of runners of forward and backward, and functions that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import nn

from ascend_parallel.sharding.grad_dtype import accumulate_wide
from ascend_parallel.sharding.runtime.evaluation_graph import in_evaluation
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss, Losses
from ascend_parallel.training.optimizer.targets import OwnedParameter
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import TrainingPlan, evaluation_mode, rows_of_part


class Runner(ABC):
    """Runs forward and backward for a training step.

    modules
        This rank's part of the model.
    unreduced
        Whether the optimizer sums gradients over its replicas itself.
    unsaved
        Names in the model of state that other ranks save, cut in another way.
    """

    modules: Sequence[nn.Module]
    unreduced: bool
    unsaved: Set[str] = frozenset()

    @abstractmethod
    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss`` (of the sum if the loss counts). `last`: the last before a step."""

    @abstractmethod
    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode; gradients stay unchanged."""

    @abstractmethod
    def finish(self) -> None:
        """Sum the gradients that must be summed before the optimizer steps."""

    def clear(self) -> None:
        """Drop all gradients."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    @abstractmethod
    def targets(self) -> list[OwnedParameter]:
        """Return this rank's parameters."""

    @abstractmethod
    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shards of parameters and buffers."""


def use_evaluation_graph(planned: TrainingPlan, modules: Sequence[ShardedModule]) -> None:
    """Switch modules to the evaluation graph; the first call compares the graph with the model in evaluation mode.

    Raises the errors of `TrainingPlan.check_evaluation`, on all ranks.
    """
    if not planned.plan.graph.training or all(module.evaluation is not None for module in modules):
        return
    planned.check_evaluation()
    for module in modules:
        module.evaluation = in_evaluation(module.plan.graph)


def evaluation_loss(
    run: Callable[..., Any], modules: Sequence[nn.Module], batch: Sequence[Any], count: int
) -> torch.Tensor:
    """Return the mean loss of a batch in `count` micro-batches with the modules in evaluation mode."""
    losses = Losses(count)
    with torch.no_grad(), evaluation_mode(modules):
        for micro_batch in micro_batches(batch, count):
            losses.add(run(*micro_batch))
    return losses.batch().mean


def micro_batches(batch: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """Yield the `count` micro-batches of a batch: equal parts of its tensors, anything else unchanged."""

    def part(value: Any, number: int) -> Any:
        if not isinstance(value, torch.Tensor) or count == 1:
            return value
        rows = rows_of_part(value, count)
        return value[number * rows : (number + 1) * rows]

    for number in range(count):
        yield [part(value, number) for value in batch]


def accumulate_in_fp32(parameters: Iterable[nn.Parameter], strategy: Strategy) -> None:
    """Accumulate 16-bit gradients in fp32 where the strategy says so."""
    if strategy.wide_gradients:
        accumulate_wide(parameters)


def partition_dim(strategy: Strategy) -> str | None:
    """Return the mesh dimension over which the optimizer is partitioned; None if it is not."""
    return strategy.sharding.dim if strategy.sharding.zero_stage else None
