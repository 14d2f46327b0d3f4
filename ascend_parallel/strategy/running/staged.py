"""A rank's stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.pieces import Piece
from ascend_parallel.strategy.optimizer.targets import Target, module_targets
from ascend_parallel.strategy.pipeline.run import Pipeline
from ascend_parallel.strategy.planned import TrainingPlan
from ascend_parallel.strategy.running.runner import divided_over


class Staged:
    """This rank's stages of a pipeline."""

    def __init__(
        self, planned: TrainingPlan, settings: Settings | None, local_batches: bool, timeout: timedelta | None
    ) -> None:
        """Take this rank's stages. Every rank comes."""
        self._strategy = strategy = planned.strategy
        self.pipeline = Pipeline(
            planned.model,
            planned.plan,
            planned.stages,
            planned.meshes,
            schedule=strategy.pipeline.schedule,
            micro_batches=strategy.pipeline.micro_batches,
            overlap=strategy.overlap.operators,
            settings=settings,
            local_inputs=local_batches,
            timeout=timeout,
            bucket_bytes=strategy.comm_fusion.bucket_bytes or 1,
            recompute=strategy.recompute if strategy.recompute.modules else None,
        )
        self.modules, self.unreduced = self.pipeline.modules, strategy.sharding.level == 2

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> torch.Tensor:
        """Add the gradients of ``factor * loss``; return the loss."""
        self.pipeline.factor = factor
        return self.pipeline.step(*batch)

    def finish(self) -> None:
        """Sum over ranks and, what several stages share, over stages; at level 2 the optimizer sums over replicas."""
        self.pipeline.reduce_gradients(but=[self._strategy.sharding.dim] if self.unreduced else [])

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""
        holders: dict[str, int] = {}
        for part in self.pipeline.parts:
            for name in part.parameters:
                holders[name] = holders.get(name, 0) + 1
        dim = divided_over(self._strategy)
        return [one for module in self.modules for one in module_targets(module, dim, stages=holders)]

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's part of parameters and buffers."""
        return self.pipeline.pieces()
