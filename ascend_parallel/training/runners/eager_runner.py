"""Run a model's own Python: by a plan, or as it is written, with its own collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.process_groups.consistency import DisagreementError, confirm_same, fingerprint, store_all_gather
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.batch_checks import EVERY, is_due
from ascend_parallel.training.checkpoint.module_shards import tensor_shards_of
from ascend_parallel.training.loss import BatchLoss, Loss, Losses, WithLoss, loss_problem
from ascend_parallel.training.masked_means import CountedMeans, MaskedMeans, warn_of_replicas
from ascend_parallel.training.optimizer.targets import OwnedParameter, trained_parameters
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.runners.runner import (
    Runner,
    accumulate_in_fp32,
    evaluation_loss,
    micro_batches,
    partition_dim,
)
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import TrainingPlan, evaluation_mode


class EagerRunner(Runner):
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

    def targets(self) -> list[OwnedParameter]:
        """Return this rank's parameters."""
        shards, mesh, dim, targets = self.tensor_shards(), self._mesh, partition_dim(self._strategy), []
        for path, parameter in self._local.items():
            placements = cast(DTensor, self._sharded[path]).placements
            pairs = zip(mesh.dim_names, placements, strict=True)
            replicated = [name for name, placement in pairs if not placement.is_shard()]
            group = mesh.group(dim) if dim is not None and dim in replicated else None
            copies = prod(map(mesh.size, replicated))
            targets.append(OwnedParameter(path, parameter, shards[path], group, copies))
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
        ("amp.level='O1'" if strategy.amp.level == "O1" else "amp.keep_fp32", strategy.amp.casts_operators),
        ("sharding.zero_stage=2", strategy.sharding.zero_stage == 2),
    ):
        if is_set:
            raise StrategyOptionError(f"{name} with static=False: give static=True, whose graph it needs")


class HybridRunner(Runner):
    """Runs a model as written, with its own collectives (mode "hybrid"); gradients are summed over data."""

    def __init__(self, model: nn.Module, loss: Loss, strategy: Strategy) -> None:
        """Take the rank's own model; at amp level O2 it is cast in place."""
        if strategy.amp.casts_model:
            model = model.to(getattr(torch, str(strategy.amp.dtype)))
        self._model, self._loss, self._amp = model, loss, strategy.amp
        self.modules, self.unreduced = (model,), True
        self._seen, self._unequal = 0, False
        accumulate_in_fp32(model.parameters(), strategy)
        (mesh,) = strategy.meshes()
        mesh.device_mesh()
        self._replicas = 1 if strategy.data_dim is None else strategy.mesh[strategy.data_dim]
        self._group = None if strategy.data_dim is None else mesh.group(strategy.data_dim)
        if self._group is not None:
            mine = {"the model's parameters": fingerprint(model)}
            cure = "Seed replicas alike, or load one checkpoint"
            confirm_same(self._group, "train_step", mine, "ranks call train_step differently", cure)
        if prod(strategy.mesh.values()) > self._replicas and not hasattr(model, "tensor_shards"):
            raise StrategyOptionError(
                'mode="hybrid" with a mesh of more than the data dimension: give the model a method tensor_shards() -> '
                "dict[str, TensorShard] that tells which shard of each parameter a rank holds"
            )

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> BatchLoss:
        """Add this rank's terms of the gradients of ``factor * mean loss``; return the mean over data."""
        losses = Losses(1, factor)
        with self._comparing_counts(), self._autocast():
            returned = self._returned(batch)
        share, own = losses.add(returned), losses.batch()
        (share if own.count is not None else share / self._replicas).backward()  # type: ignore[no-untyped-call]
        return self._mean(own)

    def evaluate(self, batch: Sequence[Any]) -> torch.Tensor:
        """Return the mean over data of the loss in evaluation mode."""
        with torch.no_grad(), evaluation_mode(self.modules):
            losses = Losses(1)
            with self._autocast():
                losses.add(self._returned(batch))
            return self._mean(losses.batch()).mean

    def _returned(self, batch: Sequence[Any]) -> Any:
        """Return the loss function's value; raise `ValueError` unless it is a mean, or a sum and its divisor."""
        returned = self._loss(self._model, *batch)
        if problem := loss_problem(returned):
            raise ValueError(problem)
        return returned

    def _autocast(self) -> AbstractContextManager[object]:
        """Return torch's autocast at level O1."""
        if self._amp.level != "O1":
            return nullcontext()
        device = next(self._model.parameters()).device.type
        return torch.autocast(device, dtype=getattr(torch, str(self._amp.dtype)))

    @contextmanager
    def _comparing_counts(self) -> Iterator[None]:
        """Warn, once, if replicas take means over unequal counts; every rank compares in the same batches."""
        number, self._seen = self._seen, self._seen + 1
        if self._group is None or self._unequal or not is_due(number, EVERY):
            yield
            return
        with CountedMeans() as means:
            yield
        self._unequal = warn_of_replicas(means.count, self._group)

    def _mean(self, own: BatchLoss) -> BatchLoss:
        """Return the mean over data: of the means, or of sums and counts."""
        if own.count is None:
            return BatchLoss(self._summed(own.total / self._replicas))
        return BatchLoss(self._summed(own.total), self._summed(own.count))

    def finish(self) -> None:
        """Leave the sums to the optimizer."""

    def _summed(self, number: torch.Tensor) -> torch.Tensor:
        total = number.clone()
        if self._group is not None:
            run_collective("the mean loss", dist.all_reduce, total, group=self._group)
        return total

    def targets(self) -> list[OwnedParameter]:
        """Return this rank's parameters; each is replicated along the data dimension."""
        shards, everybody = self.tensor_shards(), dist.group.WORLD
        assert everybody is not None
        parameters = {name: param for name, param in self._model.named_parameters() if param.requires_grad}
        mine = {name: str((shards[name].offsets, tuple(param.shape))) for name, param in parameters.items()}
        by_rank = store_all_gather(everybody, "train_step", mine, DisagreementError).values()
        copies = {name: sum(bounds.get(name) == my_bounds for bounds in by_rank) for name, my_bounds in mine.items()}
        return [
            OwnedParameter(name, param, shards[name], self._group, copies[name]) for name, param in parameters.items()
        ]

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return the model's own `tensor_shards()` if it has the method, else its whole state."""
        if hasattr(self._model, "tensor_shards"):
            shards: dict[str, TensorShard] = self._model.tensor_shards()  # type: ignore[operator]
            return shards
        return {name: TensorShard.whole(tensor) for name, tensor in self._model.state_dict().items()}
