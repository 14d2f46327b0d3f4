"""to_static: a model marked by shard_tensor and its relatives, trained by the graph, as in Paddle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import Placed, Value, named_tensors
from ascend_parallel.sharding.marked.dtensors import reshard, shard_tensor, unshard
from ascend_parallel.sharding.marked.shard_dataloader import ShardedLoader
from ascend_parallel.sharding.marked.shard_layer import has_stepped, optimizer_stage
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.sharding.tracing.marked_tensors import keep_placements, placements_of, plain_copy
from ascend_parallel.training.loss import Loss, mean_loss
from ascend_parallel.training.optimizer.factory import optimizer_factory
from ascend_parallel.training.options import ShardingOptions, StrategyOptionError
from ascend_parallel.training.step_arguments import ModelSnapshot, OptimizerSnapshot
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.train_step import TrainStep, train_step
from ascend_parallel.training.training_plan import plan_prediction

# What Paddle's DistModel has, in the words of this package (examples/for_paddle_and_mindspore_users).
IN_PADDLE = {
    "train": "call the training step: to_static(..., optimizer=optimizer) trains, and evaluate(*batch) does not",
    "eval": "evaluate(*batch) of the training step returns the loss in evaluation mode",
    "predict": "to_static(model, loader) without an optimizer returns the model's output",
    "mode": "to_static with an optimizer trains, its evaluate(*batch) evaluates, to_static without one predicts",
    "state_dict": "step.save(folder) saves the values of all ranks, and write_back() puts them into the marked model",
    "set_state_dict": "step.load(folder) loads under any layout",
    "dist_main_program": "step.explain() prints the plan",
}


@overload
def to_static(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Loss | nn.Module = mean_loss,
    optimizer: None = None,
    strategy: Strategy | None = None,
    input_spec: Sequence[Any] | None = None,
    *,
    settings: Settings | None = None,
) -> StaticPredictor: ...
@overload
def to_static(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Loss | nn.Module = mean_loss,
    *,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | None = None,
    input_spec: Sequence[Any] | None = None,
    **options: Any,
) -> StaticModel: ...
@overload
def to_static(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Loss | nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | None = None,
    input_spec: Sequence[Any] | None = None,
    **options: Any,
) -> StaticModel: ...
def to_static(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Loss | nn.Module = mean_loss,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: Strategy | None = None,
    input_spec: Sequence[Any] | None = None,
    **options: Any,
) -> StaticModel | StaticPredictor:
    """Make the training step of a marked model: the same marks that it runs with eagerly decide the graph's plan.

    Without an optimizer: the model in evaluation mode, for prediction.

    model
        Its parameters and buffers are DTensors on one mesh of all ranks in ascending order (`shard_layer`). The plan
        holds them as they are placed, and chooses all other layouts. The model keeps its values, for eager runs.
    loader
        Yields batches, of which the first is read for its shapes: from `shard_dataloader`, whose `shard_dim` is the
        data dimension, or any that yields tuples of whole tensors.
    input_spec
        A batch of whole tensors in place of the loader's first, such as ``[torch.empty(16, 8, device="meta")]``; only
        shapes and dtypes matter.
    loss
        As for `train_step`; or a module such as nn.MSELoss(), called with the model's output for all but the last of
        the batch's tensors, and with the last.
    optimizer
        Over the model's parameters. The stage that `shard_optimizer` gave it becomes `sharding.zero_stage`. None: the
        result is a `StaticPredictor`, of the model's output, or of ``loss(model, *batch)`` if `loss` is given.
    strategy
        Mode "auto" without a mesh of its own; by default nothing but the marks.
    options
        Arguments of `train_step`: `settings`, `check_batches`, `timeout`.

    Every rank calls it alike. Raises `ValueError` for a model without marks or on several meshes,
    `StrategyOptionError` for options that contradict the marks, and the errors of `train_step`.
    """
    mesh, stage = _mesh_of(model), None if optimizer is None else optimizer_stage(optimizer)
    placed = dict(placements_of(model))
    for name, parameter in model.named_parameters(remove_duplicate=False) if stage is not None else ():
        assert stage is not None
        if parameter in stage.placements:  # stage 3 has cut it since it was marked
            placed[name] = Placed(placed[name].mesh, stage.placements[parameter])
    whole = plain_copy(model, _whole)
    keep_placements(whole, placed)
    is_sharded = isinstance(loader, ShardedLoader)
    data_dim = cast(ShardedLoader, loader).shard_dim if is_sharded else None
    if is_sharded and not cast(ShardedLoader, loader).has_one_mesh:
        raise ValueError("the loader's inputs lie differently: to_static takes one mesh and one of shard_dims for all")
    if is_sharded and cast(ShardedLoader, loader).mesh != mesh:
        raise ValueError(f"the loader's mesh is {cast(ShardedLoader, loader).mesh}, and the model's {mesh}: give one")
    sharding = None if stage is None else ShardingOptions(zero_stage=stage.stage, dim=stage.dim_name)
    strategy = _strategy(strategy, mesh, data_dim, sharding, is_sharded)
    batch = _sample(loader) if input_spec is None else pytree.tree_map_only(torch.Tensor, _zeros, tuple(input_spec))
    loss = _with_targets(loss) if isinstance(loss, nn.Module) else loss
    if optimizer is None:
        plan = plan_prediction(strategy, whole, batch, loss, settings=options.get("settings"))
        module = ShardedModule(whole, plan, overlap=strategy.overlap.operators, local_inputs=is_sharded, **options)
        return StaticPredictor(module, model, mesh)
    step = train_step(
        whole,
        batch,
        _optimizer_over(optimizer, model, whole),
        strategy,
        loss=loss,
        local_batches=is_sharded,
        **options,
    )
    return StaticModel(step, model, mesh, OptimizerSnapshot(optimizer))


class StaticModel:
    """``static(*batch)`` trains on a batch and returns its mean loss, the same number on every rank.

    step
        The `TrainStep`, with its optimizer, checkpoints and `explain`.
    """

    def __init__(self, step: TrainStep, model: nn.Module, mesh: ProcessMesh, given: OptimizerSnapshot) -> None:
        """Take the step, the marked model whose copy it trains, and the guard of the optimizer that was given."""
        self.step, self._model, self._mesh, self._given = step, model, mesh, given
        self._before = ModelSnapshot(model)
        assert step.planned is not None
        self._inputs = _InputPlacements(mesh, step.planned.plans)

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch of the loader.

        Raises `RuntimeError` if the optimizer that `to_static` was given has stepped or changed since, as by a
        learning rate scheduler (make schedulers over ``step.optimizer``), or the model other than by `write_back`.
        """
        self._given.check()
        self._before.check()
        return self.step(*self._inputs.local(batch))

    def evaluate(self, *batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch in evaluation mode."""
        return self.step.evaluate(*self._inputs.local(batch))

    def __getattr__(self, name: str) -> Any:
        """Answer the words of Paddle's DistModel."""
        raise _answer_to_paddle(self, name)

    @torch.no_grad()
    def write_back(self) -> nn.Module:
        """Copy the trained values into the marked model, and return the model: to look at it, and run it eagerly.

        Every rank must call it.
        """
        held = named_tensors(self._model, all_names=True)
        for name, shard in self.step.tensor_shards().items():
            if name in held:
                marked = cast(DTensor, held[name])
                marked.copy_(shard_tensor(_gathered(shard), self._mesh, marked.placements))
        self._before = ModelSnapshot(self._model)
        return self._model

    def close(self) -> None:
        """Close the step; see `TrainStep.close`."""
        self.step.close()


class StaticPredictor:
    """``predictor(*batch)`` runs a marked model in evaluation mode, without gradients, and returns its whole output.

    module
        This rank's part of the model.
    """

    def __init__(self, module: ShardedModule, model: nn.Module, mesh: ProcessMesh) -> None:
        """Take the planned model, and the marked model with whose values it runs."""
        self.module, self._before, self._inputs = module, ModelSnapshot(model), _InputPlacements(mesh, [module.plan])

    @torch.no_grad()
    def __call__(self, *batch: Any) -> Any:
        """Return the output for a batch of the loader, the same on every rank.

        Raises `RuntimeError` if the marked model has changed since.
        """
        if names := self._before.changed():
            raise RuntimeError(f"the model has changed since to_static ({names}): call to_static again")
        return self.module(*self._inputs.local(batch))

    def __getattr__(self, name: str) -> Any:
        """Answer the words of Paddle's DistModel."""
        raise _answer_to_paddle(self, name)


def _answer_to_paddle(owner: object, name: str) -> AttributeError:
    there = f", which is of Paddle's DistModel: {IN_PADDLE[name]}" if name in IN_PADDLE else ""
    return AttributeError(f"{type(owner).__name__} has no {name!r}{there}")


class _InputPlacements:
    """The placements in which plans read the tensors of a batch, by the inputs' names."""

    def __init__(self, mesh: ProcessMesh, plans: Iterable[ShardingPlan]) -> None:
        self._mesh = mesh
        self._placements = {
            node.source: [placement.placement for placement in plan.layouts[Value(node.name)]]
            for plan in plans
            for node in plan.graph.inputs
        }

    def local(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return this rank's part of a batch in any nesting, as the plan reads it: it may cut a batch further."""

        def local(path: Any, value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            name = "_".join(["batch", *(str(getattr(key, "idx", getattr(key, "key", ""))) for key in path)])
            return reshard(value, self._mesh, self._placements.get(name, value.placements)).to_local()

        return pytree.tree_map_with_path(local, batch)  # type: ignore[no-any-return]


def _gathered(shard: TensorShard) -> torch.Tensor:
    """Return a whole tensor from the shards of all ranks, some of which may hold the same."""
    local = shard.local.detach()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (shard.offsets, local.cpu()))
    whole = torch.empty(shard.shape, dtype=local.dtype)
    for offsets, part in parts:
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
    return whole.to(local.device)


def _whole(tensor: DTensor) -> torch.Tensor:
    return unshard(cast(DTensor, tensor.detach())).clone()


def _mesh_of(model: nn.Module) -> ProcessMesh:
    """Return the mesh of all DTensors of a model; raise unless there is one, of all ranks in ascending order."""
    meshes: dict[ProcessMesh, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, DTensor):
            raise ValueError(f"{name} is no DTensor: call shard_layer, which replicates what has no marks")
        meshes.setdefault(ProcessMesh.of(tensor.device_mesh), name)
    if len(meshes) != 1:
        names = ", ".join(f"{name} on {mesh}" for mesh, name in meshes.items()) or "no tensor"
        raise ValueError(f"to_static takes a model on one mesh, and this has {names}; stages need train_step")
    (mesh,) = meshes
    if mesh.process_ids != list(range(dist.get_world_size())):
        raise ValueError(f"to_static takes a mesh of all {dist.get_world_size()} ranks in ascending order, not {mesh}")
    return mesh


def _strategy(
    given: Strategy | None,
    mesh: ProcessMesh,
    data_dim: str | None,
    sharding: ShardingOptions | None,
    loader_decides: bool,
) -> Strategy:
    """Return the given strategy with the mesh, the data dimension and the ZeRO stage of the marks."""
    sizes, default = mesh.sizes, Strategy()
    strategy = given or default
    if strategy.mode != "auto":
        raise StrategyOptionError(f'mode={strategy.mode!r} with to_static: the marks decide; give mode "auto"')
    if strategy.mesh not in (default.mesh, sizes):
        raise StrategyOptionError(f"mesh={dict(strategy.mesh)}, and the model is marked on {sizes}: leave mesh out")
    if sharding is not None and strategy.sharding not in (default.sharding, sharding):
        raise StrategyOptionError(f"{strategy.sharding}, and shard_optimizer was called with {sharding}: give one")
    if not loader_decides:
        data_dim = strategy.data_dim if strategy.data_dim in sizes else None
    return replace(strategy, mesh=sizes, data_dim=data_dim, sharding=sharding or strategy.sharding)


def _sample(loader: Iterable[Any]) -> tuple[Any, ...]:
    """Return a batch like the loader's first, of whole tensors; values do not matter."""
    for batch in loader:
        if isinstance(batch, (torch.Tensor, Mapping)):
            raise TypeError(f"the loader yields a {type(batch).__name__}: give one that yields tuples, such as (x,)")
        return pytree.tree_map_only(DTensor, _zeros, tuple(batch))  # type: ignore[no-any-return]
    raise ValueError("the loader yields no batch, and the first is needed for its shapes")


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    device = default_device() if tensor.is_meta else tensor.device
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def _optimizer_over(optimizer: torch.optim.Optimizer, model: nn.Module, whole: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings over the copy's parameters."""
    if has_stepped(optimizer):
        raise ValueError("the optimizer has stepped: call to_static before the first step, or give a new one")
    copies = dict(zip(model.parameters(), whole.parameters(), strict=True))
    parameters = [[copies[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    return optimizer_factory(optimizer, model).make(parameters)


def _with_targets(criterion: nn.Module) -> Loss:
    def loss(model: nn.Module, *batch: Any) -> Any:
        *inputs, target = batch
        return criterion(model(*inputs), target)

    return loss
