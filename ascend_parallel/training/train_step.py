"""A training step of a strategy: made once on every rank, then called with batch after batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.mesh import default_device
from ascend_parallel.sharding.runtime import randomness
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.batch_checks import EVERY, BatchCheck
from ascend_parallel.training.checkpoint.loading import load
from ascend_parallel.training.checkpoint.saving import Saving, save
from ascend_parallel.training.explain import explain, plan_warnings
from ascend_parallel.training.loss import GradientDivisor, Loss, mean_loss
from ascend_parallel.training.optimizer.factory import OptimizerFactory, optimizer_factory
from ascend_parallel.training.optimizer.parallel_optimizer import ParallelOptimizer
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.rank_watch import RankWatch
from ascend_parallel.training.runners.eager_runner import EagerRunner, HybridRunner
from ascend_parallel.training.runners.graph_runner import GraphRunner, PipelineRunner
from ascend_parallel.training.runners.runner import Runner
from ascend_parallel.training.step_arguments import (
    ModelSnapshot,
    OptimizerSnapshot,
    StepOptions,
    check_all_updated,
    check_arguments,
    check_training_mode,
)
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import TrainingPlan, cast, plan_training

log = logging.getLogger("ascend_parallel")


def train_step(
    model: nn.Module,
    batch: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    loss: Loss = mean_loss,
    static: bool = True,
    local_batches: bool = False,
    check_batches: int = EVERY,
    settings: Settings | None = None,
    timeout: timedelta | None = None,
) -> TrainStep:
    """Make the training step of `model` by `strategy`. Every rank of the default group must call it alike.

    model
        The model for a single card (in mode "hybrid" this rank's part), with the same values on every rank. It is not
        changed, except in mode "hybrid", where it is trained itself.
    batch
        A batch like those to come, of all replicas together; its values do not matter.
    optimizer
        Any that `optimizer_factory` takes, made over the model's parameters; `TrainStep.optimizer` replaces it.
    loss
        Called as ``loss(model, *batch)``; returns the mean loss, or ``(sum, count)`` with an integer count: the step
        then divides by the count of all micro-batches, replicas and merged batches. `WeightedLoss` has any number as
        its divisor. By default the model returns the loss.
    static
        True: the traced graph runs, with overlapped operators. False: the model's own Python runs on DTensors by the
        same plan (`sharding.parallelize`), and the model is changed in place; not with stages, recompute, fused passes.
    local_batches
        Every rank gives its own part of the batches, along the data dimension. False: every rank gives whole batches.
    check_batches
        Ranks that must get the same batch compare digests of each of the first 8 batches, then of every N-th batch;
        0: never. In mode "hybrid" these are the ranks at one place along `data_dim`.
    settings
        Settings of the overlapped operators; None: the current settings.
    timeout
        How long stages of a pipeline wait for each other.

    Raises `DisagreementError` on every rank if their strategies differ, `StrategyOptionError` if the job's number of
    ranks is not the strategy's, `ValueError` for a parameter that requires grad but is in no parameter group of the
    optimizer, `DegreeError` if the bits are to be the same at every degree and are not, and the errors of
    `plan_training`, `parallelize`, `Pipeline` and `ParallelOptimizer`.
    """
    options = StepOptions(static, local_batches, check_batches)
    check_arguments(model, batch, strategy, options)
    if strategy.max_norm is not None:
        (settings or current_settings()).arithmetic.refuse(
            f"max_norm={strategy.max_norm}: the norm of gradients is summed over the ranks' parts, which has no tree"
        )
    factory = optimizer_factory(optimizer, model)
    check_all_updated(factory, model)
    planned = None if strategy.mode == "hybrid" else _planned(strategy, model, batch, loss, static, settings)
    if planned is None:
        runner: Runner = HybridRunner(model, loss, strategy)
    elif not static:
        runner = EagerRunner(planned, loss, local_batches)
    elif planned.stages:
        runner = PipelineRunner(planned, settings, local_batches, timeout)
    else:
        runner = GraphRunner(planned, settings, local_batches)
    parallel = _parallel_optimizer(runner, factory, strategy)
    given: list[ModelSnapshot | OptimizerSnapshot] = [OptimizerSnapshot(optimizer)]
    given += [ModelSnapshot(model)] if planned is not None and static else []
    check = BatchCheck(batch, strategy, planned.plans if planned else (), local_batches, check_batches)
    return TrainStep(strategy, planned, runner, parallel, check, given, settings)


def _planned(
    strategy: Strategy, model: nn.Module, batch: Sequence[Any], loss: Loss, static: bool, settings: Settings | None
) -> TrainingPlan:
    # The model's own Python runs without overlapped operators.
    planned = plan_training(strategy, model, batch, loss, overlap=None if static else False, settings=settings)
    check_training_mode(planned)
    for warning in plan_warnings(planned) if dist.get_rank() == 0 else ():
        log.warning("train_step: %s", warning)
    return planned


def _parallel_optimizer(runner: Runner, factory: OptimizerFactory, strategy: Strategy) -> ParallelOptimizer:
    master = torch.float32 if strategy.amp.has_masters else None
    return ParallelOptimizer(
        runner.targets(),
        factory,
        zero_stage=strategy.sharding.zero_stage,
        partition_by=strategy.sharding.partition_by,
        max_norm=strategy.max_norm,
        master_dtype=master,
        unreduced=runner.unreduced,
        loss_scale=LossScale() if strategy.amp.dtype == "float16" else None,
        bucket_bytes=strategy.comm_fusion.bucket_bytes,
    )


def _preserved_random_state() -> AbstractContextManager[None]:
    """Return a context after which random numbers, also the device's, continue as if none were drawn inside."""
    device = torch.device(default_device())
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(device_type=device.type)


class TrainStep:
    """``step(*batch)`` trains on one batch and returns its mean loss.

    strategy, planned
        The strategy and its plan; `planned` is None in mode "hybrid".
    modules
        This rank's part of the model, a module for each stage.
    optimizer
        The `ParallelOptimizer`; torch's learning rate schedulers work on it.
    batches
        The number of batches trained on, also before the loaded checkpoint: the data's position.
    """

    def __init__(
        self,
        strategy: Strategy,
        planned: TrainingPlan | None,
        runner: Runner,
        optimizer: ParallelOptimizer,
        check: BatchCheck,
        given: Sequence[ModelSnapshot | OptimizerSnapshot],
        settings: Settings | None = None,
    ) -> None:
        """Take the runner of forward and backward, and the optimizer; see `train_step`.

        given
            The optimizer that `train_step` was given, and the model, where the step trains a copy.
        """
        self.strategy, self.planned, self.optimizer = strategy, planned, optimizer
        self.modules = tuple(runner.modules)
        self.batches = 0
        self._runner, self._watch, self._settings = runner, RankWatch(), settings
        self._saving: Saving | None = None
        self._divisor = GradientDivisor(strategy.gradient_merge)
        self._check, self._given, self._failed = check, given, False

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch. Every rank calls it alike, with the same batch or, with local_batches, its part.

        The optimizer steps after every `gradient_merge.steps` batches; gradients from before the first of them are
        dropped. Raises `DisagreementError` on every rank if the batches of a replica's ranks differ (`check_batches`),
        `ValueError` for a batch that does not match the batch the step was made with, and `RankLostError` if ranks
        have stopped; `RuntimeError` if the model or optimizer that `train_step` was given has changed since, where
        the step has its own.
        """
        for snapshot in self._given:
            snapshot.check()
        merge, tensors = self.strategy.gradient_merge, self._checked(batch)
        last = (self.batches + 1) % merge.steps == 0
        if self.batches % merge.steps == 0:
            self._clear()
        elif self._failed:
            raise RuntimeError(
                f"batch {self.batches} failed before and may have left a part of its gradients in the sum of "
                f"gradient_merge.steps={merge.steps} batches: load() a checkpoint"
            )
        self._failed = True
        factor = 1 / merge.steps if merge.average else 1.0
        if self.optimizer.loss_scale is not None:
            factor *= self.optimizer.loss_scale.scale
        with self._watch.name_lost_ranks(self.batches):
            # A pipeline sums gradients over stages first, and only then over replicas.
            with self.optimizer.no_sync() if isinstance(self._runner, PipelineRunner) else nullcontext():
                loss = self._runner.accumulate(tensors, factor, last)
            self._divisor.add(loss)
            if last:
                self._runner.finish()
                self.optimizer.divisor = self._divisor.value
                self.optimizer.step()
                self._clear()
        self.batches, self._failed = self.batches + 1, False
        return loss.mean

    def evaluate(self, *batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch in evaluation mode: no dropout, running statistics, nothing trained.

        Every rank calls it alike, with a batch as for training. Random numbers, gradients and the data's position stay
        unchanged. Raises as a training step does, and `StrategyOptionError` at the first batch if the model runs
        operators in evaluation mode that it did not run in training.
        """
        tensors = self._checked(batch)
        with self._watch.name_lost_ranks(self.batches), _preserved_random_state(), randomness.kept(self.modules):
            return self._runner.evaluate(tensors)

    def _checked(self, batch: Sequence[Any]) -> list[Any]:
        """Return a batch in the strategy's dtype; refuse other shapes, and batches that differ within a replica."""
        with self._watch.name_lost_ranks(self.batches):
            error = self._check.error(batch)
        if error is not None:
            raise error
        return [cast(value, self.strategy) for value in batch]

    def _clear(self) -> None:
        """Drop all gradients, also those of a failed batch."""
        self._divisor.clear()
        self.optimizer.zero_grad()
        self._runner.clear()

    def explain(self, operators: bool = False) -> str:
        """Return the effect of each option of the strategy; with `operators` the whole sharding plan too."""
        if self.planned is None:
            return 'mode "hybrid": the model runs as it is written'
        return explain(self.planned, operators, self._settings)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's shards of the model's parameters and buffers."""
        return self._runner.tensor_shards()

    def save(
        self,
        path: str | Path,
        values: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Saving:
        """Save a checkpoint ``path/step-N``, N the batches so far, with everything that training continues from.

        values
            Any other state, equal on all ranks: of a learning rate scheduler, of the data.

        Refused between the batches of a gradient merge, whose gradients are not saved. See `checkpoint.save`.
        """
        if self.batches % self.strategy.gradient_merge.steps:
            raise StrategyOptionError(
                f"{self.batches} batches are no multiple of gradient_merge.steps="
                f"{self.strategy.gradient_merge.steps}: save after the optimizer's step"
            )
        mine = {"batches": self.batches, "optimizer": self.optimizer.plain_state(), "user": dict(values or {})}
        mine["random"] = randomness.plain_state(self.modules)
        others = self._runner.unsaved
        held = {name: shard for name, shard in self.tensor_shards().items() if name not in others}
        state = self.optimizer.tensor_shards().items()
        shards = {
            "model": held,
            "optimizer": {key: shard for key, shard in state if key.rpartition(".")[0] not in others},
        }
        self._saving = save(path, step=self.batches, values=mine, asynchronous=asynchronous, keep=keep, **shards)
        return self._saving

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint of any layout, or the latest of a folder; return the `values` saved with it."""
        self._clear()
        state = self.optimizer.empty_tensor_shards()
        values = load(path, model=self.tensor_shards(), optimizer=state).values
        self.optimizer.load_tensor_shards(state)
        self.optimizer.load_plain_state(values["optimizer"])
        randomness.load_plain_state(self.modules, values.get("random"))
        self.batches, self._failed = values["batches"], False
        user: dict[str, Any] = values["user"]
        return user

    def close(self) -> None:
        """Wait for a checkpoint that is being saved, and stop this rank's heartbeats.

        Call it before torch.distributed.destroy_process_group.
        """
        if self._saving is not None:
            self._saving.wait()
        self._watch.stop()
