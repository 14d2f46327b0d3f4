"""The framework's own computation of a call, beside a patched layer, without side effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


class Reference(Protocol):
    """The framework's own computation of a call, run without side effects."""

    def forward(self) -> torch.Tensor:
        """Return the output."""
        ...

    def backward(
        self, dy: torch.Tensor, kept: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of input and weight, None if not required; `kept` and `weight`: as in `Begin`."""
        ...


class PlainReference:
    """The framework's own forward of a call on an alias of x, and the gradients that autograd computes from it."""

    def __init__(
        self, x: torch.Tensor, parameter: torch.Tensor, original: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Alias x; the alias requires a gradient if x does. `parameter` is what `original` reads as the weight."""
        self._original = original
        self._x = x.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled())
        self._parameter = parameter
        self._output: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """Return the output; keep it with its graph, whose saved tensors are hidden from the run's hooks.

        Its edge would be enough, but torch 2.7 dies of the edge of a DTensor's collective.
        """
        with _random_states_kept(self._x.device), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            y = self._original(self._x)
        self._output = y if y.requires_grad else None
        return y.detach()

    def backward(
        self, dy: torch.Tensor, kept: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of input and weight, None if not required; call this once."""
        assert self._output is not None
        wanted = [each for each in (self._x, self._parameter) if each.requires_grad]
        with _random_states_kept(self._x.device):
            gradients = iter(torch.autograd.grad([self._output], wanted, [dy], allow_unused=True))
        dx, dw = (next(gradients) if each.requires_grad else None for each in (self._x, self._parameter))
        return dx, dw.to_local() if isinstance(dw, DTensor) else dw


def _random_states_kept(device: torch.device) -> Any:
    devices = [] if device.type == "cpu" else [device.index]
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
