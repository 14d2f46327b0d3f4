"""Apply a `Strategy` to a model: one graph, one sharding plan, its stages. Pure: uses no processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.annotate import annotated
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.evaluation_graph import check_evaluation, in_evaluation
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.autocast import autocast, with_casts
from ascend_parallel.training.graph_passes import fuse_operators
from ascend_parallel.training.loss import Loss, WithLoss, loss_value, mean_loss, trace_with_loss
from ascend_parallel.training.optimizer.partition import sharded_parameters
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.pipeline.stage_assignment import assign, balanced
from ascend_parallel.training.recompute import check_recompute
from ascend_parallel.training.strategy import Strategy

log = logging.getLogger("ascend_parallel")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The plan of a training: a strategy applied to a model and a batch.

    model
        The model to train, in the strategy's dtype, on the meta device or not.
    plan
        The plan of one micro-batch, on the mesh of the first stage.
    meshes, plans
        The mesh of each group of ranks, and the plan on it: `plan` itself, or one for each shape of the meshes.
    stages
        The stage of every node; empty without a pipeline.
    ops_fused
        The number of operators that each pass of `fused_passes` removed.
    loss, batch
        The loss and the micro-batch that were traced.
    """

    strategy: Strategy
    model: nn.Module
    plan: ShardingPlan
    meshes: tuple[ProcessMesh, ...]
    plans: tuple[ShardingPlan, ...] = ()
    stages: Mapping[str, int] = field(default_factory=dict)
    ops_fused: Mapping[str, int] = field(default_factory=dict)
    loss: Loss = mean_loss
    batch: tuple[Any, ...] = ()

    @property
    def different_plans(self) -> tuple[ShardingPlan, ...]:
        """The plans, each once."""
        return tuple({id(plan): plan for plan in self.plans}.values())

    def check_evaluation(self) -> None:
        """Trace the model in evaluation mode.

        Raises `StrategyOptionError` unless its operators are those of training, except dropout and running statistics.
        """
        with evaluation_mode([self.model]):
            traced = trace_with_loss(self.model, self.loss, self.batch)
        traced, _ = fuse_operators(traced, self.strategy.fused_passes)
        traced, _ = autocast(traced, self.strategy.amp)
        try:
            check_evaluation(in_evaluation(self.plan.graph), traced)
        except ValueError as error:
            raise StrategyOptionError(f"evaluate: {error}") from None


def plan_training(
    strategy: Strategy,
    model: nn.Module,
    batch: Sequence[Any],
    loss: Loss = mean_loss,
    *,
    overlap: bool | None = None,
    settings: Settings | None = None,
    trace_step: Callable[[nn.Module, Loss, Sequence[Any]], Graph] = trace_with_loss,
) -> TrainingPlan:
    """Plan the training of `model` on batches like `batch`, for any number of ranks and without starting any.

    model
        The model for a single card; it is not changed. On the meta device it needs no memory.
    batch
        A batch of all replicas together, as ``loss(model, *batch)`` takes it; the tensors' first dimension is the
        batch.
    loss
        Returns the mean loss of a batch, (sum, count) or `WeightedLoss`; by default the model returns the loss.
    overlap, settings
        As for `propagate`; without `overlap.operators` of the strategy nothing overlaps.
    trace_step
        Returns the graph of a micro-batch's loss; several plans of one model may share graphs.

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
    traced = tuple(meta_part(value, strategy) for value in batch)
    graph = trace_step(model, loss, traced)
    graph, ops_fused = fuse_operators(graph, strategy.fused_passes)
    check_recompute(graph, strategy.recompute)
    _check_loss_dtype(autocast(graph, strategy.amp)[0])
    meshes = strategy.meshes()
    by_shape: dict[tuple[int, ...], ShardingPlan] = {}
    for mesh in meshes:
        if mesh.shape not in by_shape:
            by_shape[mesh.shape] = _sharded(
                strategy, graph, mesh, {**marked, **strategy.operators}, overlap=overlap, settings=settings
            )
    plan = by_shape[meshes[0].shape]
    stages: Mapping[str, int] = {}
    if strategy.pipeline.degree > 1:
        patterns, count = strategy.pipeline.stages, strategy.pipeline.count
        assigned = patterns or any(hasattr(module, "pipeline_stage") for module in model.modules())
        of_plan = plan.graph
        stages = assign(of_plan, model, patterns, count) if assigned else balanced(of_plan, count, strategy.hardware)
    return TrainingPlan(
        strategy=strategy,
        model=model,
        plan=plan,
        meshes=meshes,
        plans=tuple(by_shape[mesh.shape] for mesh in meshes),
        stages=stages,
        ops_fused=ops_fused,
        loss=loss,
        batch=traced,
    )


def plan_prediction(
    strategy: Strategy,
    model: nn.Module,
    batch: Sequence[Any],
    loss: Loss = mean_loss,
    *,
    settings: Settings | None = None,
) -> ShardingPlan:
    """Plan ``loss(model, *batch)``, which may return anything, with the model in evaluation mode, on one mesh.

    Raises `StrategyOptionError` for stages, fused passes and mixed precision, and as `trace` and `propagate`.
    """
    default = Strategy()
    for name in ("pipeline", "amp", "fused_passes"):
        if getattr(strategy, name) != getattr(default, name):
            raise StrategyOptionError(f"{name}={getattr(strategy, name)!r} without an optimizer: leave it out")
    with evaluation_mode([model]):
        graph = trace(WithLoss(model, loss), tuple(batch))
    (mesh,) = strategy.meshes()
    return _sharded(strategy, graph, mesh, {**annotated(model), **strategy.operators}, settings=settings)


def _check_loss_dtype(graph: Graph) -> None:
    if graph.meta(loss_value(graph)).dtype == torch.float16:
        raise StrategyOptionError(
            'amp.dtype="float16" and a loss in float16: its scale is above the largest float16. Compute the loss in '
            "fp32, as from logits.float()"
        )


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules in evaluation mode inside; afterwards restore the mode of each submodule."""
    roots = [(module, any(part.training for part in module.modules())) for module in modules]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, mode in roots:
            module.train(mode)  # the model may override train()
        for part, mode in modes:
            part.training = mode


def in_dtype(model: nn.Module, strategy: Strategy) -> nn.Module:
    """Return the model, or a copy of it in the strategy's dtype."""
    if not strategy.amp.casts_model:
        return model
    return copy.deepcopy(model).to(getattr(torch, str(strategy.amp.dtype)))


def cast(value: Any, strategy: Strategy) -> Any:
    """Return a floating-point tensor of a batch in the strategy's dtype; anything else unchanged."""
    if not strategy.amp.casts_model or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(getattr(torch, str(strategy.amp.dtype)))


def meta_part(value: Any, strategy: Strategy) -> Any:
    """Return a micro-batch of a batch's tensor, for tracing: only its shape, dtype and device matter."""
    if not isinstance(value, torch.Tensor):
        return value
    rows = rows_of_part(value, strategy.pipeline.micro_batches)
    replicas = 1 if strategy.data_dim is None else strategy.mesh[strategy.data_dim]
    for place, mesh in enumerate(strategy.pipeline.meshes):
        if strategy.data_dim is not None and rows % mesh[strategy.data_dim]:
            raise StrategyOptionError(
                f"pipeline.meshes[{place}]={dict(mesh)}: a micro-batch has {rows} rows ({list(value.shape)} in "
                f"pipeline.micro_batches={strategy.pipeline.micro_batches} parts), which {strategy.data_dim}="
                f"{mesh[strategy.data_dim]} does not divide: give a batch of a multiple of rows, or other micro_batches"
            )
    if rows % replicas:
        log.warning("%s rows of a micro-batch on %s replicas: what does not divide is not cut", rows, replicas)
    return cast(value.detach()[:rows], strategy)


def rows_of_part(tensor: torch.Tensor, parts: int) -> int:
    """Return the rows of each of `parts` micro-batches; raise unless the rows divide evenly."""
    if tensor.ndim == 0 or tensor.shape[0] % parts:
        raise StrategyOptionError(
            f"pipeline.micro_batches={parts}: a batch's tensor is {list(tensor.shape)}; its first dimension is the "
            "batch and has to be a multiple"
        )
    return tensor.shape[0] // parts


def _sharded(
    strategy: Strategy,
    graph: Graph,
    mesh: ProcessMesh,
    operators: Mapping[str, Any],
    *,
    overlap: bool | None = None,
    settings: Settings | None = None,
) -> ShardingPlan:
    auto = strategy.mode == "auto"
    # Along a dimension of one rank nothing is sharded; to ask for it would only take shardings from the others.
    replicated = auto and strategy.data_dim is not None and mesh.size(strategy.data_dim) > 1
    experts_apart = strategy.expert_dim is not None and mesh.size(strategy.expert_dim) > 1
    plan = propagate(
        graph,
        mesh,
        operators,
        objective="time" if auto else "redistribution",
        semi_auto=None if auto else strategy.data_dim,
        data_dim=strategy.data_dim if replicated else None,
        sequence_dim=strategy.sequence_dim,
        sequence_exchange=strategy.sequence_exchange,
        sequence_groups=strategy.sequence_groups,
        expert_dim=strategy.expert_dim if experts_apart else None,
        memory_limit=strategy.memory_limit,
        batch_norm=strategy.batch_norm,
        hardware=strategy.hardware,
        overlap=overlap if strategy.overlap.operators else False,
        settings=settings,
    )
    plan = with_casts(plan, strategy.amp)
    return sharded_parameters(plan, strategy.sharding.dim) if strategy.sharding.zero_stage == 3 else plan
