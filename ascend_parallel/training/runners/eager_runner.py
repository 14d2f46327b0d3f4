"""Run a planned model's own Python."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.module_shards import tensor_shards_of
from ascend_parallel.training.loss import BatchLoss, Loss, Losses, WithLoss
from ascend_parallel.training.masked_means import MaskedMeans
from ascend_parallel.training.optimizer.targets import Target, trained_parameters
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.runners.runner import accumulate_in_fp32, evaluation_loss, micro_batches, partition_dim
from ascend_parallel.training.training_plan import TrainingPlan


class EagerRunner:
    """Runs a planned model's own Python; the optimizer gets the local tensors of its DTensors."""

    def __init__(self, planned: TrainingPlan, loss: Loss, local_batches: bool) -> None:
        """Shard the model in place. Every rank must call it."""
        _check_eager(planned)
        self._strategy, model = planned.strategy, planned.model
        self._joined = parallelize(WithLoss(model, loss), planned.plan, local_inputs=local_batches)
        self.modules, self.unreduced, self._mesh = (model,), False, planned.plan.mesh
        self._sharded = trained_parameters(model, planned.plan)
        self._local = {name: nn.Parameter(local_tensor(param)) for name, param in self._sharded.items()}
        self._means = MaskedMeans(planned.plan, self._strategy.pipeline.micro_batches)
        for parameters in (self._sharded, self._local):
            accumulate_in_fp32(parameters.values(), self._strategy)

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``."""
        self._means.check(batch)
        count = self._strategy.pipeline.micro_batches
        losses = Losses(count, factor)
        for micro_batch in micro_batches(batch, count):
            losses.add(self._joined(*micro_batch)).backward()  # type: ignore[no-untyped-call]
        return losses.batch()

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode; raise if the model then runs other operators than were traced."""
        return evaluation_loss(self._joined, self.modules, batch, self._strategy.pipeline.micro_batches)

    def finish(self) -> None:
        """Give the optimizer the gradients, which are summed."""
        for name, parameter in self._sharded.items():
            self._local[name].grad = None if parameter.grad is None else local_tensor(parameter.grad)
            parameter.grad = None

    def clear(self) -> None:
        """Drop all gradients."""
        self.modules[0].zero_grad(set_to_none=True)

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""
        shards, mesh, dim, targets = self.tensor_shards(), self._mesh, partition_dim(self._strategy), []
        for path, parameter in self._local.items():
            placements = cast(DTensor, self._sharded[path]).placements
            pairs = zip(mesh.dim_names, placements, strict=True)
            replicated = [name for name, placement in pairs if not placement.is_shard()]
            group = mesh.group(dim) if dim is not None and dim in replicated else None
            copies = prod(map(mesh.size, replicated))
            targets.append(Target(path, parameter, shards[path], group, copies))
        return targets

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shards of parameters and buffers."""
        return tensor_shards_of(self.modules[0])


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, detached."""
    return cast(DTensor, tensor.detach()).to_local()


def _check_eager(planned: TrainingPlan) -> None:
    """Refuse the options that need static=True."""
    strategy = planned.strategy
    for name, is_set in (
        ("pipeline.degree", planned.stages),
        ("recompute", strategy.recompute.modules or Recompute.of(planned.model).modules),
        ("fused_passes", strategy.fused_passes),
        ("sharding.zero_stage=2", strategy.sharding.zero_stage == 2),
    ):
        if is_set:
            raise StrategyOptionError(f"{name} with static=False: give static=True, whose graph it needs")
