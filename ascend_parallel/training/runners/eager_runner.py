"""A planned model whose own Python runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.module_shards import tensor_shards_of
from ascend_parallel.training.loss import BatchLoss, Loss, Losses, WithLoss
from ascend_parallel.training.masked_means import MaskedMeans
from ascend_parallel.training.optimizer.targets import Target
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.runners.runner import divided_over, keep_gradients, loss_of, part_of
from ascend_parallel.training.training_plan import TrainingPlan


class EagerRunner:
    """A planned model whose own Python runs; the optimizer has the local tensors of its DTensors."""

    def __init__(self, planned: TrainingPlan, loss: Loss, local_batches: bool) -> None:
        """Shard the model in place. Every rank comes."""
        _check_eager(planned)
        self._strategy, model = planned.strategy, planned.model
        self._joined = parallelize(WithLoss(model, loss), planned.plan, local_inputs=local_batches)
        self.modules, self.unreduced, self._mesh = (model,), False, planned.plan.mesh
        given = (node.source for node in planned.plan.graph.nodes.values() if node.kind == PARAMETER)
        read = set(map(model.get_parameter, given))  # the others have no gradient
        self._sharded = {name: one for name, one in model.named_parameters() if one.requires_grad and one in read}
        self._local = {name: nn.Parameter(local_of(one)) for name, one in self._sharded.items()}
        self._means = MaskedMeans(planned.plan, self._strategy.pipeline.micro_batches)
        for parameters in (self._sharded, self._local):
            keep_gradients(parameters.values(), self._strategy)

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``."""
        self._means.look(batch)
        count = self._strategy.pipeline.micro_batches
        losses = Losses(count, factor)
        for number in range(count):
            found = self._joined(*(part_of(one, number, count) for one in batch))
            losses.add(found).backward()  # type: ignore[no-untyped-call]
        return losses.batch()

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode, if the model runs as it was traced there too."""
        return loss_of(self._joined, self.modules, batch, self._strategy.pipeline.micro_batches)

    def finish(self) -> None:
        """Give the optimizer the gradients, which are summed."""
        for name, parameter in self._sharded.items():
            self._local[name].grad = None if parameter.grad is None else local_of(parameter.grad)
            parameter.grad = None

    def clear(self) -> None:
        """Drop all gradients."""
        self.modules[0].zero_grad(set_to_none=True)

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""
        shards, mesh, dim, found = self.tensor_shards(), self._mesh, divided_over(self._strategy), []
        for path, parameter in self._local.items():
            placements = cast(DTensor, self._sharded[path]).placements
            whole = [name for name, one in zip(mesh.dim_names, placements, strict=True) if not one.is_shard()]
            group = mesh.group(dim) if dim is not None and dim in whole else None
            copies = prod(map(mesh.size, whole))
            found.append(Target(path, parameter, shards[path], group, copies))
        return found

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's part of parameters and buffers."""
        return tensor_shards_of(self.modules[0])


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, as it lies."""
    return cast(DTensor, tensor.detach()).to_local()


def _check_eager(planned: TrainingPlan) -> None:
    """Refuse by name what only a graph can."""
    strategy = planned.strategy
    for name, given in (
        ("pipeline.degree", planned.stages),
        ("recompute", strategy.recompute.modules or Recompute.of(planned.model).modules),
        ("fused_passes", strategy.fused_passes),
        ("sharding.zero_stage=2", strategy.sharding.zero_stage == 2),
    ):
        if given:
            raise StrategyOptionError(f"{name} with static=False: only the graph can, which static=True runs")
