"""Check a training step's model and optimizer: all is trained, in training mode, by the step's own optimizer."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ascend_parallel.sharding.mesh import default_device
from ascend_parallel.sharding.runtime.sharded_module import is_modal
from ascend_parallel.training.optimizer.factory import OptimizerFactory
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.training_plan import TrainingPlan


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


class StaleOptimizerGuard:
    """The optimizer passed to `train_step`. The step copies its settings, so later changes to it have no effect."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer's settings."""
        self._optimizer = weakref.ref(optimizer)
        self._before, self._steps = _settings(optimizer), _steps(optimizer)

    def check(self) -> None:
        """Raise `RuntimeError` if the optimizer was stepped, or its settings changed, as by an LR scheduler."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        changed = [
            f"{name} from {before[name]!r} to {value!r}"
            for before, current in zip(self._before, _settings(optimizer), strict=False)
            for name, value in current.items()
            if name in before and before[name] != value
        ]
        if changed or _steps(optimizer) != self._steps:
            change = f"changed ({', '.join(dict.fromkeys(changed))})" if changed else "stepped"
            raise RuntimeError(
                f"the optimizer that train_step was given was {change} since, which trains nothing: the step has its "
                "own. Make schedulers over step.optimizer, and set learning rates in its param_groups"
            )


def _steps(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return how often each parameter was updated; its length tells which parameters have a state."""
    return [float(state["step"]) if "step" in state else 0.0 for state in optimizer.state.values()]


def preserve_random_state() -> AbstractContextManager[None]:
    """Return a context after which random numbers, also the device's, continue as if none were drawn inside."""
    device = torch.device(default_device())
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(device_type=device.type)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, tuple)
    return [
        {name: value for name, value in group.items() if isinstance(value, plain)} for group in optimizer.param_groups
    ]
