"""A rank's stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, PARAMETER
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss
from ascend_parallel.training.masked_means import MaskedMeans
from ascend_parallel.training.optimizer.targets import Target, module_targets
from ascend_parallel.training.pipeline.pipeline import Pipeline
from ascend_parallel.training.runners.runner import divided_over, keep_gradients, take_evaluation
from ascend_parallel.training.training_plan import TrainingPlan, evaluating


class PipelineRunner:
    """This rank's stages of a pipeline."""

    def __init__(
        self, planned: TrainingPlan, settings: Settings | None, local_batches: bool, timeout: timedelta | None
    ) -> None:
        """Take this rank's stages. Every rank comes."""
        self._planned, self._strategy = planned, planned.strategy
        strategy = planned.strategy
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
            bucket_bytes=strategy.comm_fusion.bucket_bytes,
            recompute=strategy.recompute if strategy.recompute.modules else None,
        )
        given = [node for part in self.pipeline.parts for node in part.plan.graph.nodes.values()]
        read = {node.source for node in given if node.kind in (PARAMETER, BUFFER)}
        self._unread = unread(planned.model, read)
        self._means = MaskedMeans(planned.plan, planned.strategy.pipeline.micro_batches)
        keep_gradients((one for module in self.pipeline.modules for one in module.parameters()), strategy)
        self.modules, self.unreduced = self.pipeline.modules, strategy.sharding.zero_stage == 2

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``."""
        self._means.look(batch)
        self.pipeline.factor = factor
        mean, count = self.pipeline.step(*batch), self.pipeline.count
        return BatchLoss(mean if count is None else mean * count, count)

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode."""
        take_evaluation(self._planned, self.modules)
        with evaluating(self.modules):
            return self.pipeline.evaluate(*batch)

    def finish(self) -> None:
        """Sum over ranks and, what several stages share, over stages; at zero_stage 2 the optimizer sums over replicas."""
        self.pipeline.reduce_gradients(but=[self._strategy.sharding.dim] if self.unreduced else [])

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""
        dim, shared, found = divided_over(self._strategy), self.pipeline.shared, []
        for module in self.modules:
            meshes = {name: shared.meshes[one] for name, one in module.named_parameters() if one in shared.meshes}
            found += module_targets(module, dim, meshes=meshes)
        return [one for one in found if one.parameter not in shared.repeated]

    def clear(self) -> None:
        """Drop all gradients."""
        self.pipeline.zero_grad()

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's part of parameters and buffers; what no stage reads is whole on every rank."""
        return self._unread | self.pipeline.tensor_shards()


def unread(model: nn.Module, read: Set[str]) -> dict[str, TensorShard]:
    """Return, whole, what of a model's state has none of the names in `read` and is tied to nothing that has."""
    state = model.state_dict(keep_vars=True)
    tensors = {id(tensor) for name, tensor in state.items() if name in read}
    rest = {name: tensor.detach().clone() for name, tensor in state.items() if id(tensor) not in tensors}
    return {name: TensorShard(tensor, tuple(tensor.shape), (0,) * tensor.ndim) for name, tensor in rest.items()}
