"""A `Strategy` applied to a model: one graph, one sharding plan, its stages. Pure: no process is asked."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.annotate import annotated
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.evaluation_graph import check_evaluation, in_evaluation
from ascend_parallel.training.graph_passes import fuse_operators
from ascend_parallel.training.loss import Loss, loss_value, mean_loss, trace_with_loss
from ascend_parallel.training.optimizer.zero3 import sharded_parameters
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.pipeline.stage_assignment import assign, balanced
from ascend_parallel.training.recompute import check_recompute
from ascend_parallel.training.strategy import Strategy

log = logging.getLogger("ascend_parallel")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a strategy comes to for a model and a batch.

    model
        The one that is trained: of the strategy's dtype, on the meta device or not.
    plan
        Of one micro-batch, on the mesh of the first stage; the other stages' meshes are `meshes`.
    stages
        Stage of every node; empty without a pipeline.
    ops_fused
        Operators that each of the fused passes ops_fused.
    loss, batch
        What was traced beside the model; `batch` is one micro-batch.
    """

    strategy: Strategy
    model: nn.Module
    plan: ShardingPlan
    meshes: tuple[ProcessMesh, ...]
    stages: Mapping[str, int] = field(default_factory=dict)
    ops_fused: Mapping[str, int] = field(default_factory=dict)
    loss: Loss = mean_loss
    batch: tuple[Any, ...] = ()

    def check_evaluation(self) -> None:
        """Trace the model in evaluation mode.

        Raises `StrategyOptionError` unless it runs what it ran in training, but for dropout and running statistics.
        """
        with evaluating([self.model]):
            traced = trace_with_loss(self.model, self.loss, self.batch)
        traced, _ = fuse_operators(traced, self.strategy.fused_passes)
        try:
            check_evaluation(in_evaluation(self.plan.graph), traced)
        except ValueError as error:
            raise StrategyOptionError(f"evaluate: {error}") from None


def plan_training(strategy: Strategy, model: nn.Module, batch: Sequence[Any], loss: Loss = mean_loss) -> TrainingPlan:
    """Plan the training of `model` on a batch like `batch`, for any number of ranks and without them.

    model
        Written for one card; it is not changed. On the meta device it needs no memory.
    batch
        Of all replicas together, as ``loss(model, *batch)`` takes it; the tensors' first dimension is the batch.
    loss
        Returns the mean loss of a batch, or (sum, count); by default the model does.

    Raises `StrategyOptionError`, `StrategyError`, `TraceError`, `MemoryLimitError`.
    """
    if strategy.mode == "hybrid":
        raise StrategyOptionError('mode="hybrid": the model runs as it is written, there is nothing to plan')
    marked = annotated(model)
    if strategy.mode == "data" and marked:
        raise StrategyOptionError(
            f'mode="data", and the model has strategies, such as of {next(iter(marked))}: give mode "semi_auto"'
        )
    if strategy.mode == "semi_auto" and not marked and not strategy.operators:
        raise StrategyOptionError('mode="semi_auto" without any operator\'s strategy: give mode "data" or "auto"')
    model = in_dtype(model, strategy)
    traced = tuple(meta_part(one, strategy) for one in batch)
    graph = trace_with_loss(model, loss, traced)
    if graph.meta(loss_value(graph)).dtype == torch.float16:
        raise StrategyOptionError(
            'amp.dtype="float16" and a loss in float16, whose scale is above the largest float16: compute it in fp32, '
            "as from logits.float()"
        )
    graph, ops_fused = fuse_operators(graph, strategy.fused_passes)
    check_recompute(graph, strategy.recompute)
    meshes = strategy.meshes()
    plan = _sharded(strategy, graph, meshes[0], {**marked, **strategy.operators})
    if strategy.sharding.zero_stage == 3:
        plan = sharded_parameters(plan, strategy.sharding.dim)
    stages: Mapping[str, int] = {}
    if strategy.pipeline.degree > 1:
        patterns, count = strategy.pipeline.stages, strategy.pipeline.count
        said = patterns or any(hasattr(module, "pipeline_stage") for module in model.modules())
        stages = assign(graph, model, patterns, count) if said else balanced(graph, count)
    return TrainingPlan(
        strategy=strategy,
        model=model,
        plan=plan,
        meshes=meshes,
        stages=stages,
        ops_fused=ops_fused,
        loss=loss,
        batch=traced,
    )


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have modules in evaluation mode inside, and afterwards each part of them as it was."""
    roots = [(module, any(one.training for one in module.modules())) for module in modules]
    modes = [(one, one.training) for module in modules for one in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, mode in roots:
            module.train(mode)  # which a model may have of its own
        for one, mode in modes:
            one.training = mode


def in_dtype(model: nn.Module, strategy: Strategy) -> nn.Module:
    """Return the model, or a copy of it in the strategy's dtype."""
    if strategy.amp.dtype is None:
        return model
    return copy.deepcopy(model).to(getattr(torch, strategy.amp.dtype))


def cast(one: Any, strategy: Strategy) -> Any:
    """Return a tensor of a batch in the strategy's dtype if it has numbers with a fraction; anything else as it is."""
    if strategy.amp.dtype is None or not isinstance(one, torch.Tensor) or not one.is_floating_point():
        return one
    return one.to(getattr(torch, strategy.amp.dtype))


def meta_part(one: Any, strategy: Strategy) -> Any:
    """Return what stands for a micro-batch of a batch's tensor: its shape and dtype, on its device."""
    if not isinstance(one, torch.Tensor):
        return one
    rows = rows_of_part(one, strategy.pipeline.micro_batches)
    replicas = 1 if strategy.data_dim is None else strategy.mesh[strategy.data_dim]
    if rows % replicas:
        log.warning("%s rows of a micro-batch on %s replicas: what does not divide is not cut", rows, replicas)
    return cast(one.detach()[:rows], strategy)


def rows_of_part(one: torch.Tensor, parts: int) -> int:
    """Return the rows of a micro-batch; raise unless they divide."""
    if one.ndim == 0 or one.shape[0] % parts:
        raise StrategyOptionError(
            f"pipeline.micro_batches={parts}: a batch's tensor is {list(one.shape)}; its first dimension is the batch "
            "and has to be a multiple"
        )
    return one.shape[0] // parts


def _sharded(strategy: Strategy, graph: Graph, mesh: ProcessMesh, operators: Mapping[str, Any]) -> ShardingPlan:
    auto = strategy.mode == "auto"
    return propagate(
        graph,
        mesh,
        operators,
        objective="time" if auto else "redistribution",
        semi_auto=None if auto else strategy.data_dim,
        data_dim=strategy.data_dim if auto else None,
        memory_limit=strategy.memory_limit,
        hardware=strategy.hardware,
    )
