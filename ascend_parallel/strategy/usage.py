"""What a training step holds its caller to beside its batches: an optimizer that nobody steps."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from ascend_parallel.sharding.mesh import default_device


class Unused:
    """The optimizer that a step was made with, whose settings were taken over: what it does later has no effect."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Note its settings."""
        self._optimizer = weakref.ref(optimizer)
        self._before, self._steps = _settings(optimizer), _steps(optimizer)

    def check(self) -> None:
        """Raise `RuntimeError` if it was stepped, or its settings changed, as by a learning rate scheduler."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        changed = [
            f"{name} from {before[name]!r} to {value!r}"
            for before, now in zip(self._before, _settings(optimizer), strict=False)
            for name, value in now.items()
            if name in before and before[name] != value
        ]
        if changed or _steps(optimizer) != self._steps:
            what = f"changed ({', '.join(dict.fromkeys(changed))})" if changed else "stepped"
            raise RuntimeError(
                f"the optimizer that train_step was given was {what} since, which trains nothing: the step has its "
                "own. Make schedulers over step.optimizer, and set learning rates in its param_groups"
            )


def _steps(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return what a step changes: how often each parameter was updated, and which have a state."""
    return [float(state["step"]) if "step" in state else 0.0 for state in optimizer.state.values()]


def random_numbers_kept() -> AbstractContextManager[None]:
    """Return a context after which random numbers, also the device's, go on as if nothing had been drawn in it."""
    device = torch.device(default_device())
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(device_type=device.type)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, tuple)
    return [
        {name: value for name, value in group.items() if isinstance(value, plain)} for group in optimizer.param_groups
    ]
