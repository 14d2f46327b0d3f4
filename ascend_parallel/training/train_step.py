"""A training step of a strategy: made once on every rank, then called with one batch after another."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.consistency import DisagreementError
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.runtime import randomness
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.batch_checks import EVERY, BatchesLike, SameBatches
from ascend_parallel.training.checkpoint.loading import load
from ascend_parallel.training.checkpoint.saving import Saving, save
from ascend_parallel.training.explain import explain, plan_warnings
from ascend_parallel.training.loss import Divisor, Loss, mean_loss
from ascend_parallel.training.optimizer.factory import optimizer_factory
from ascend_parallel.training.optimizer.parallel_optimizer import ParallelOptimizer
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.rank_watch import RankWatch
from ascend_parallel.training.runners.eager_runner import EagerRunner
from ascend_parallel.training.runners.graph_runner import GraphRunner
from ascend_parallel.training.runners.hybrid_runner import HybridRunner
from ascend_parallel.training.runners.pipeline_runner import PipelineRunner
from ascend_parallel.training.runners.runner import Runner
from ascend_parallel.training.stale_optimizer import (
    StaleOptimizerGuard,
    check_all_updated,
    check_training_mode,
    random_numbers_kept,
)
from ascend_parallel.training.strategy import Strategy, confirm_same_strategy
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
    """Make the training step of `model` by `strategy`. Every rank of the default group calls it alike.

    model
        Written for one card (in mode "hybrid" this rank's part), with the same values on every rank. It is not
        changed, but in mode "hybrid", where it is what trains.
    batch
        One like those to come, of all replicas together; its numbers do not matter.
    optimizer
        Any that `optimizer_factory` takes, made over the model's parameters; it is not used itself (`TrainStep.optimizer` is).
    loss
        Called as ``loss(model, *batch)``; returns the mean loss, or ``(sum, count)`` of what it is the mean of: the
        step divides by the count of all micro-batches, replicas and merged batches. By default the model returns it.
    static
        The traced graph runs, with overlapped operators. False: the model's own Python runs on DTensors by the same
        plan (`sharding.parallelize`), and the model is changed in place; not with stages, recompute, fused passes.
    local_batches
        Every rank gives its own part of the batches, along the data dimension, and not the whole of them.
    check_batches
        Ranks that have to be given the same batch compare digests of it: of each of the first 8 batches, then of every
        so many-th; 0: never. In mode "hybrid" these are the ranks at one place along `data_dim`.
    settings
        Of the overlapped operators; by default those in force.
    timeout
        How long stages of a pipeline wait for one another.

    Raises `DisagreementError` on every rank if they come with different strategies, `StrategyOptionError` if the job
    has another number of ranks than the strategy, `ValueError` for a parameter that wants a gradient and that the
    optimizer lacks, and what `plan_training`, `parallelize`, `Pipeline` and `ParallelOptimizer` raise.
    """
    if isinstance(batch, (torch.Tensor, Mapping)):
        raise TypeError(f"batch is a {type(batch).__name__}: give the loss's arguments as a tuple, such as (x,)")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise StrategyOptionError(
            "the model is on the meta device, without values: build it on every rank with the same seed, and load a "
            "checkpoint afterwards (plan_training takes it as it is)"
        )
    if type(check_batches) is not int or check_batches < 0:
        raise StrategyOptionError(f"check_batches={check_batches!r}: give a whole number of batches, or 0 for never")
    given = {"static": static, "local_batches": local_batches, "check_batches": check_batches}
    confirm_same_strategy(strategy, batch, given)
    if dist.get_world_size() != strategy.ranks:
        raise StrategyOptionError(
            f"the strategy is for {strategy.ranks} ranks (mesh {dict(strategy.mesh)}, pipeline.degree="
            f"{strategy.pipeline.degree}), and the job has {dist.get_world_size()}"
        )
    made = optimizer_factory(optimizer, model)
    check_all_updated(made, model)
    planned: TrainingPlan | None = None
    runner: Runner
    if strategy.mode == "hybrid":
        model = model if strategy.amp.dtype is None else model.to(getattr(torch, strategy.amp.dtype))
        runner = HybridRunner(model, loss, strategy)
    else:
        planned = plan_training(strategy, model, batch, loss)
        check_training_mode(planned)
        for said in plan_warnings(planned) if dist.get_rank() == 0 else ():
            log.warning("train_step: %s", said)
        runner = (
            _runner(planned, settings, local_batches, timeout) if static else EagerRunner(planned, loss, local_batches)
        )
    master = torch.float32 if strategy.amp.dtype is not None and strategy.amp.master_weights else None
    parallel = ParallelOptimizer(
        runner.targets(),
        made,
        zero_stage=strategy.sharding.zero_stage,
        partition_by=strategy.sharding.partition_by,
        max_norm=strategy.max_norm,
        master_dtype=master,
        unreduced=runner.unreduced,
        loss_scale=LossScale() if strategy.amp.dtype == "float16" else None,
        bucket_bytes=strategy.comm_fusion.bucket_bytes,
    )
    like = BatchesLike(batch, whole=planned is not None and not local_batches)
    same = SameBatches(strategy, None if planned is None else planned.plan, local_batches, check_batches)
    return TrainStep(strategy, planned, runner, parallel, like=like, same=same, unused=optimizer, settings=settings)


def _runner(planned: TrainingPlan, settings: Settings | None, local_batches: bool, timeout: timedelta | None) -> Runner:
    if planned.stages:
        return PipelineRunner(planned, settings, local_batches, timeout)
    return GraphRunner(planned, settings, local_batches)


class TrainStep:
    """``step(*batch)`` trains on one batch and returns its mean loss.

    strategy, planned
        What it was made of; `planned` is None in mode "hybrid".
    modules
        This rank's part of the model, one module per stage.
    optimizer
        The `ParallelOptimizer`; learning rate schedulers of torch work on it.
    batches
        How many batches were trained on, also before the checkpoint that was loaded: the data's position.
    """

    def __init__(
        self,
        strategy: Strategy,
        planned: TrainingPlan | None,
        runner: Runner,
        optimizer: ParallelOptimizer,
        *,
        like: BatchesLike,
        same: SameBatches,
        unused: torch.optim.Optimizer,
        settings: Settings | None = None,
    ) -> None:
        """Take what runs forward and backward, and what updates; see `train_step`."""
        self.strategy, self.planned, self.optimizer = strategy, planned, optimizer
        self.modules = tuple(runner.modules)
        self.batches = 0
        self._runner, self._watch, self._settings = runner, RankWatch(), settings
        self._saving: Saving | None = None
        self._divisor = Divisor(strategy.gradient_merge)
        self._like, self._same, self._unused, self._failed = like, same, StaleOptimizerGuard(unused), False

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch. Every rank calls it alike, with the same batch or with local_batches its part.

        The optimizer steps after every `gradient_merge.steps` batches; gradients that are there before the first of
        them are dropped. Raises `DisagreementError` on every rank if those of one replica come with different batches
        (`check_batches`), `ValueError` for a batch unlike the one the step was made with, and `RankLostError` if ranks
        have stopped.
        """
        self._unused.check()
        merge, given = self.strategy.gradient_merge, self._given(batch)
        last = (self.batches + 1) % merge.steps == 0
        if self.batches % merge.steps == 0:
            self._clear()
        elif self._failed:
            raise RuntimeError(
                f"batch {self.batches} failed before, and may have left a part of its gradients among those of "
                f"gradient_merge.steps={merge.steps} batches: load() a checkpoint"
            )
        self._failed = True
        factor = 1 / merge.steps if merge.average else 1.0
        if self.optimizer.loss_scale is not None:
            factor *= self.optimizer.loss_scale.scale
        with self._watch.naming(self.batches):
            # In a pipeline terms are summed over stages first, and only then over replicas.
            with self.optimizer.no_sync() if isinstance(self._runner, PipelineRunner) else nullcontext():
                found = self._runner.accumulate(given, factor, last)
            self._divisor.add(found)
            if last:
                self._runner.finish()
                self.optimizer.divisor = self._divisor.value
                self.optimizer.step()
                self._clear()
        self.batches, self._failed = self.batches + 1, False
        return found.mean

    def evaluate(self, *batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch in evaluation mode: no dropout, running statistics, nothing trained.

        Every rank calls it alike, with a batch as for training. Random numbers, gradients and the data's position are
        left alone. Raises as a training step, and `StrategyOptionError` at the first batch if the model does otherwise
        in evaluation mode, which what was traced in training cannot.
        """
        given = self._given(batch)
        with self._watch.naming(self.batches), random_numbers_kept(), randomness.kept(self.modules):
            return self._runner.evaluate(given)

    def _given(self, batch: Sequence[Any]) -> list[Any]:
        """Return a batch in the strategy's dtype; refuse what is unlike the first, or unlike on ranks of a replica."""
        problem = self._like.problem(batch)
        with self._watch.naming(self.batches):
            difference = self._same.difference(batch, problem)
        if problem:
            raise ValueError(problem)
        if difference:
            raise DisagreementError(difference)
        return [cast(one, self.strategy) for one in batch]

    def _clear(self) -> None:
        """Drop all gradients, also those that a batch left which failed."""
        self._divisor.clear()
        self.optimizer.zero_grad()
        self._runner.clear()

    def explain(self, operators: bool = False) -> str:
        """Return what each option of the strategy comes to; with `operators` the whole sharding plan."""
        if self.planned is None:
            return 'mode "hybrid": the model runs as it is written'
        return explain(self.planned, operators, self._settings)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return this rank's part of the model's parameters and buffers."""
        return self._runner.tensor_shards()

    def save(
        self,
        path: str | Path,
        values: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Saving:
        """Save a checkpoint ``path/step-N``, N the batches so far: all that training goes on from.

        values
            What else there is, alike on all ranks: of a learning rate scheduler, of the data.

        Refused between the batches of a gradient merge, whose gradients are not saved. See `checkpoint.save`.
        """
        if self.batches % self.strategy.gradient_merge.steps:
            raise StrategyOptionError(
                f"{self.batches} batches are no multiple of gradient_merge.steps="
                f"{self.strategy.gradient_merge.steps}: save after the optimizer's step"
            )
        mine = {"batches": self.batches, "optimizer": self.optimizer.plain_state(), "user": dict(values or {})}
        mine["random"] = randomness.plain_state(self.modules)
        self._saving = save(
            path,
            step=self.batches,
            model=self.tensor_shards(),
            optimizer=self.optimizer.tensor_shards(),
            values=mine,
            asynchronous=asynchronous,
            keep=keep,
        )
        return self._saving

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint, of any layout, or the latest in a folder of them; return the `values` saved with it."""
        self._clear()
        state = self.optimizer.empty_tensor_shards()
        found = load(path, model=self.tensor_shards(), optimizer=state).values
        self.optimizer.load_tensor_shards(state)
        self.optimizer.load_plain_state(found["optimizer"])
        randomness.load_plain_state(self.modules, found.get("random"))
        self.batches, self._failed = found["batches"], False
        user: dict[str, Any] = found["user"]
        return user

    def close(self) -> None:
        """Wait for a checkpoint under way, and end the watch over the other ranks.

        OpCall it before torch.distributed.destroy_process_group.
        """
        if self._saving is not None:
            self._saving.wait()
        self._watch.stop()
