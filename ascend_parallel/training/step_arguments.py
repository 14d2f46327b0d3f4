"""Check the arguments of `train_step`: alone, against the job, between ranks, and that nothing changes them later."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.process_groups.consistency import confirm_same
from ascend_parallel.sharding.runtime.sharded_module import is_modal
from ascend_parallel.text import some_of
from ascend_parallel.training.optimizer.factory import OptimizerFactory, has_own_step, step_hooks
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import TrainingPlan


@dataclass(frozen=True)
class StepOptions:
    """The options of `train_step`, described there."""

    static: bool
    local_batches: bool
    check_batches: int

    def __post_init__(self) -> None:
        """Check the options by themselves."""
        if type(self.check_batches) is not int or self.check_batches < 0:
            raise StrategyOptionError(
                f"check_batches={self.check_batches!r}: give a whole number of batches, or 0 for never"
            )


def confirm_same_strategy(strategy: Strategy, batch: Sequence[Any], options: StepOptions) -> None:
    """Raise `DisagreementError` on every rank unless all have the same strategy, options and batch shapes.

    In mode "hybrid" shapes may differ.
    """
    mine = {field.name: repr(getattr(strategy, field.name)) for field in fields(strategy)}
    mine |= {field.name: repr(getattr(options, field.name)) for field in fields(options)}
    if strategy.mode != "hybrid":
        mine["batch"] = ", ".join(
            f"{list(item.shape)} of {item.dtype}" if isinstance(item, torch.Tensor) else repr(item) for item in batch
        )
    problem = "ranks call train_step differently"
    confirm_same(dist.group.WORLD, "train_step", mine, problem, "Give all ranks the same")


def check_arguments(model: nn.Module, batch: Sequence[Any], strategy: Strategy, options: StepOptions) -> None:
    """Raise an error for arguments that `train_step` cannot take, on every rank if they differ between ranks."""
    if isinstance(batch, (torch.Tensor, Mapping)):
        raise TypeError(f"batch is a {type(batch).__name__}: give the loss's arguments as a tuple, such as (x,)")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise StrategyOptionError(
            "the model is on the meta device, without values: build it on every rank with the same seed, and load a "
            "checkpoint afterwards (plan_training takes it as it is)"
        )
    complex_names = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if complex_names and strategy.amp.casts_model:
        raise StrategyOptionError(
            f"amp.dtype={strategy.amp.dtype!r} with complex parameters ({some_of(complex_names, 3)}), which have no "
            '16-bit form: give amp.level="O1", which casts operators and leaves parameters as they are'
        )
    confirm_same_strategy(strategy, batch, options)
    data = {mesh[strategy.data_dim] for mesh in strategy.stage_meshes if strategy.data_dim is not None}
    if options.local_batches and len(data) > 1:
        raise StrategyOptionError(
            f"local_batches=True with pipeline.meshes {strategy.sizes}: a batch is cut into {strategy.data_dim}="
            f"{' and '.join(map(str, sorted(data)))} parts, and samplers of different numbers of replicas draw other "
            "rows; give every rank the whole batch (local_batches=False), or all meshes one size of "
            f"{strategy.data_dim}"
        )
    if dist.get_world_size() != strategy.ranks:
        which = f"mesh {dict(strategy.mesh)}, pipeline.degree={strategy.pipeline.degree}"
        which = f"pipeline.meshes {strategy.sizes}" if strategy.pipeline.meshes else which
        raise StrategyOptionError(
            f"the strategy is for {strategy.ranks} ranks ({which}), and the job has {dist.get_world_size()}"
        )


def check_training_mode(planned: TrainingPlan) -> None:
    """Raise `StrategyOptionError` for a plan of evaluation mode if its operators behave differently in training."""
    graph = planned.plan.graph
    modal = {node.call.name for node in graph.nodes.values() if node.call is not None and is_modal(node.call)}
    if modal and not graph.training:
        raise StrategyOptionError(
            f"the model is in evaluation mode: {', '.join(sorted(modal))} would be trained without dropout and with "
            "fixed statistics; call model.train() before train_step"
        )


def check_all_updated(factory: OptimizerFactory, model: nn.Module) -> None:
    """Raise `ValueError` for a parameter that requires grad but is in no parameter group of the optimizer."""
    updated = frozenset[str]().union(*(names for names, _ in factory.groups))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in updated:
            raise ValueError(
                f"{name} requires grad but is in no parameter group of the optimizer: add it, or requires_grad_(False)"
            )


class ModelSnapshot:
    """The model passed to `train_step`, where the step trains a copy: later changes to the model have no effect."""

    def __init__(self, model: nn.Module) -> None:
        """Record the parameters, whether they require grad, and the hooks."""
        self._model, self._before = model, dict(_of_model(model))

    def changed(self) -> str:
        """Return the names of parameters that were written, replaced, added or frozen, and of hooks; "" for none."""
        now = dict(_of_model(self._model))
        names = {name.removesuffix(WRITES) for name in {*now, *self._before} if now.get(name) != self._before.get(name)}
        return some_of(sorted(names), 5) if names else ""

    def check(self) -> None:
        """Raise `RuntimeError` if the model has changed."""
        if names := self.changed():
            raise RuntimeError(
                f"the model that train_step was given has changed since ({names}), which trains nothing: the step "
                "trains its own part of a copy. Load, freeze and hook a model before train_step; step.load takes a "
                "checkpoint later"
            )


WRITES = ": values"


def _of_model(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what a training step copies from a model, by name."""
    for path, module in model.named_modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks):
            yield f"hooks of {path or 'the model'}", tuple(map(tuple, hooks))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                path_of_parameter = f"{path}.{name}".removeprefix(".")
                own_hooks = tuple(parameter._backward_hooks or ()), tuple(_after_accumulation(parameter))
                yield path_of_parameter, (id(parameter), parameter.requires_grad, own_hooks)
                yield path_of_parameter + WRITES, parameter._version


def _after_accumulation(parameter: torch.Tensor) -> Mapping[int, object]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


class OptimizerSnapshot:
    """The optimizer passed to `train_step`. The step makes its own of it, so later changes to it have no effect."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer's settings, parameters, steps and hooks."""
        self._optimizer = weakref.ref(optimizer)
        self._settings, self._before = _settings(optimizer), _comparable(optimizer)

    def check(self) -> None:
        """Raise `RuntimeError` if the optimizer was stepped or changed, as by an LR scheduler."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        settings = [
            f"changed ({name} from {before[name]!r} to {value!r})"
            for before, now in zip(self._settings, _settings(optimizer), strict=False)
            for name, value in now.items()
            if name in before and before[name] != value
        ]
        others = [change for change, now in _comparable(optimizer).items() if now != self._before[change]]
        if settings or others:
            raise RuntimeError(
                f"the optimizer that train_step was given was {(settings + others)[0]} since, which trains nothing: "
                "the step has its own. Make schedulers over step.optimizer, set learning rates in its param_groups, "
                "and register hooks on it"
            )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, tuple)
    return [
        {name: value for name, value in group.items() if isinstance(value, plain)} for group in optimizer.param_groups
    ]


def _comparable(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return, by what a change is called, the state of an optimizer besides its settings."""
    groups, states = optimizer.param_groups, optimizer.state.values()
    return {
        "stepped": [float(state["step"]) if "step" in state else 0.0 for state in states],
        "given other parameters": [[id(parameter) for parameter in group["params"]] for group in groups],
        "given other settings": [
            [value._version for value in group.values() if isinstance(value, torch.Tensor)] for group in groups
        ],
        "given a hook": [id(hook) for hook in step_hooks(optimizer)],
        "given another step": has_own_step(optimizer),
    }
