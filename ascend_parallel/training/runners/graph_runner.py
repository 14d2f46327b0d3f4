"""Run a rank's part of a planned graph: of the whole graph, or of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, PARAMETER
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.loss import BatchLoss, Losses
from ascend_parallel.training.masked_means import MaskedMeans
from ascend_parallel.training.optimizer.targets import OwnedParameter, module_targets
from ascend_parallel.training.pipeline.pipeline import Pipeline
from ascend_parallel.training.runners.runner import (
    Runner,
    accumulate_in_fp32,
    evaluation_loss,
    micro_batches,
    partition_dim,
    use_evaluation_graph,
)
from ascend_parallel.training.training_plan import TrainingPlan, evaluation_mode


class GraphRunner(Runner):
    """Runs this rank's part of a graph, micro-batch by micro-batch."""

    modules: tuple[ShardedModule, ...]

    def __init__(self, planned: TrainingPlan, settings: Settings | None, local_batches: bool) -> None:
        """Build this rank's part. Every rank must call it."""
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
        accumulate_in_fp32(self.module.parameters(), strategy)
        self.modules, self.unreduced = (self.module,), strategy.sharding.zero_stage == 2

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``."""
        self._means.check(batch)
        count = self._strategy.pipeline.micro_batches
        losses = Losses(count, factor)
        for number, micro_batch in enumerate(micro_batches(batch, count)):
            sums_now = last and number == count - 1 and self._strategy.overlap.gradients and not self.unreduced
            later = (self._strategy.sharding.dim,) if self.unreduced else ()
            with nullcontext() if sums_now else self.module.no_sync(*later):
                losses.add(self.module(*micro_batch)).backward()  # type: ignore[no-untyped-call]
        return losses.batch()

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode."""
        use_evaluation_graph(self._planned, self.modules)
        return evaluation_loss(self.module, self.modules, batch, self._strategy.pipeline.micro_batches)

    def finish(self) -> None:
        """Sum unsummed gradients; at ZeRO stage 2 the optimizer sums over its replicas."""
        if not self.unreduced:
            self.module.reduce_gradients()

    def targets(self) -> list[OwnedParameter]:
        """Return this rank's parameters."""
        return module_targets(self.module, partition_dim(self._strategy))

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shards of parameters and buffers."""
        return self.module.tensor_shards()


class PipelineRunner(Runner):
    """Runs this rank's stages of a pipeline."""

    modules: tuple[ShardedModule, ...]

    def __init__(
        self, planned: TrainingPlan, settings: Settings | None, local_batches: bool, timeout: timedelta | None
    ) -> None:
        """Build this rank's stages. Every rank must call it."""
        self._planned, self._strategy = planned, planned.strategy
        strategy = planned.strategy
        self.pipeline = Pipeline(
            planned.model,
            planned.plans,
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
        nodes = [node for part in self.pipeline.parts for node in part.plan.graph.nodes.values()]
        read = {node.source for node in nodes if node.kind in (PARAMETER, BUFFER)}
        self._unread = unread_state(planned.model, read)
        self.unsaved = names_of(planned.model, self.pipeline.held_elsewhere)
        self._means = MaskedMeans(planned.plan, planned.strategy.pipeline.micro_batches)
        accumulate_in_fp32((param for module in self.pipeline.modules for param in module.parameters()), strategy)
        self.modules, self.unreduced = self.pipeline.modules, strategy.sharding.zero_stage == 2

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add the gradients of ``factor * loss``."""
        self._means.check(batch)
        self.pipeline.factor = factor
        mean, count = self.pipeline.step(*batch), self.pipeline.count
        return BatchLoss(mean if count is None else mean * count, count)

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the loss in evaluation mode."""
        use_evaluation_graph(self._planned, self.modules)
        with evaluation_mode(self.modules):
            return self.pipeline.evaluate(*batch)

    def finish(self) -> None:
        """Sum over ranks, and over stages for shared parameters; at ZeRO stage 2 the optimizer sums over replicas."""
        self.pipeline.reduce_gradients(but=[self._strategy.sharding.dim] if self.unreduced else [])

    def targets(self) -> list[OwnedParameter]:
        """Return this rank's parameters."""
        dim, shared, targets = partition_dim(self._strategy), self.pipeline.shared, list[OwnedParameter]()
        for module in self.modules:
            meshes = {name: shared.meshes[param] for name, param in module.named_parameters() if param in shared.meshes}
            targets += module_targets(module, dim, meshes=meshes)
        return [target for target in targets if target.parameter not in shared.repeated]

    def clear(self) -> None:
        """Drop all gradients."""
        self.pipeline.zero_grad()

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shards of parameters and buffers; state that no stage reads is whole on every rank."""
        return self._unread | self.pipeline.tensor_shards()


def unread_state(model: nn.Module, read: Set[str]) -> dict[str, TensorShard]:
    """Return, whole, the model's state that is not named in `read` and not tied to state named there."""
    known = names_of(model, read)
    rest = ((name, tensor) for name, tensor in model.state_dict().items() if name not in known)
    return {name: TensorShard.whole(tensor.clone()) for name, tensor in rest}


def names_of(model: nn.Module, sources: Set[str]) -> Set[str]:
    """Return all names of the state that `sources` name."""
    state = model.state_dict(keep_vars=True)
    tensors = {id(tensor) for name, tensor in state.items() if name in sources}
    return frozenset(name for name, tensor in state.items() if id(tensor) in tensors)
