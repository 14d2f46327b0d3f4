"""A rank's part of a planned graph, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss, Losses
from ascend_parallel.training.masked_means import MaskedMeans
from ascend_parallel.training.optimizer.targets import Target, module_targets
from ascend_parallel.training.runners.runner import divided_over, keep_gradients, loss_of, part_of, take_evaluation
from ascend_parallel.training.training_plan import TrainingPlan


class GraphRunner:
    """This rank's part of a graph, micro-batch by micro-batch."""

    def __init__(self, planned: TrainingPlan, settings: Settings | None, local_batches: bool) -> None:
        """Take this rank's part. Every rank comes."""
        self._planned, self._strategy = planned, planned.strategy
        strategy = planned.strategy
        self.module = ShardedModule(
            planned.model,
            planned.plan,
            overlap=strategy.overlap.operators,
            settings=settings,
            local_inputs=local_batches,
            recompute=strategy.recompute if strategy.recompute.modules else None,
            bucket_bytes=strategy.comm_fusion.bucket_bytes,
        )
        self._means = MaskedMeans(planned.plan, planned.strategy.pipeline.micro_batches)
        keep_gradients(self.module.parameters(), strategy)
        self.modules, self.unreduced = (self.module,), strategy.sharding.zero_stage == 2

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``."""
        self._means.look(batch)
        count = self._strategy.pipeline.micro_batches
        losses = Losses(count, factor)
        for number in range(count):
            summed = last and number == count - 1 and self._strategy.overlap.gradients and not self.unreduced
            later = (self._strategy.sharding.dim,) if self.unreduced else ()
            with nullcontext() if summed else self.module.no_sync(*later):
                found = self.module(*(part_of(one, number, count) for one in batch))
                losses.add(found).backward()  # type: ignore[no-untyped-call]
        return losses.batch()

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode."""
        take_evaluation(self._planned, self.modules)
        return loss_of(self.module, self.modules, batch, self._strategy.pipeline.micro_batches)

    def finish(self) -> None:
        """Sum what was held back; at zero_stage 2 the optimizer sums over its replicas."""
        if not self.unreduced:
            self.module.reduce_gradients()

    def clear(self) -> None:
        """Drop all gradients."""
        self.module.zero_grad(set_to_none=True)

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""
        return module_targets(self.module, divided_over(self._strategy))

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's part of parameters and buffers."""
        return self.module.tensor_shards()
