"""Run Megatron-core's own forward and backward of a call, beside a patched layer, without side effects.

The original runs on aliases of the same input and weight. It returns its gradients instead of accumulating them,
and restores buffers and random states. The patched layer's backward and gradients are observed without changing its
operands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ascend_parallel.ops.operators import without_autocast
from ascend_parallel.overlap.choices import cast_by_autocast

Output = tuple[torch.Tensor, torch.Tensor | None]
Forward = Callable[[Any, torch.Tensor, torch.Tensor], Output]


class Original:
    """A call of a layer, computed by Megatron-core's original methods."""

    def __init__(self, layer: Any, x: torch.Tensor, weight: torch.Tensor, rank: int, forward: Forward) -> None:
        """Alias x and weight, cast as autocast casts them; the aliases require gradients if x and weight do.

        `rank` is this process's rank in the layer's group; `forward` the original forward.
        """
        self._rank, self._forward = rank, forward
        self._x, self._weight = (cast_by_autocast(operand).detach() for operand in (x, weight))
        if torch.is_grad_enabled():
            self._x.requires_grad_(x.requires_grad)
            self._weight.requires_grad_(weight.requires_grad)
        self._layer = StandIn(
            layer,
            weight=self._weight,
            # Cast the bias too: the original's backward under CPU autocast needs the operands' dtype.
            bias=None if layer.bias is None else cast_by_autocast(layer.bias).detach(),
            gradient_accumulation_fusion=False,
            config=StandIn(layer.config, defer_embedding_wgrad_compute=False),
        )
        self._output: GradientEdge | None = None
        self._saved: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def forward(self) -> torch.Tensor:
        """Return the output; keep only the graph's edge and its saved tensors, x and the weight."""
        with leaving_no_trace(self._x.device), saved_tensors_hooks(self._keep, self._give):
            y = without_autocast(self._forward)(self._layer, self._x, self._weight)[0]
        self._output = get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def backward(
        self, dy: torch.Tensor, kept: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of input and weight, None if not required; call this once.

        `kept` and `weight` are the tensors of the patched layer's backward. They may differ from those of forward:
        saved-tensor hooks of the run may return other tensors, and the weight's data may have been replaced.
        """
        assert self._output is not None
        self._saved = kept, weight
        inputs = [alias for alias in (self._x, self._weight) if alias.requires_grad]
        with leaving_no_trace(self._x.device):
            gradients = iter(torch.autograd.grad([self._output], inputs, [dy], allow_unused=True))
        dx, dw = (next(gradients) if alias.requires_grad else None for alias in (self._x, self._weight))
        return dx, dw

    def _keep(self, saved: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Save a tensor, hidden from the run's hooks, which count and move tensors; mark whether it is the weight."""
        return saved, saved.data_ptr() == self._weight.data_ptr() and saved.shape == self._weight.shape

    def _give(self, kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
        """Return the patched backward's tensor in place of the saved x [S, ..., K] or weight, if it has the tensor."""
        saved, is_weight = kept
        patched = self._saved[is_weight]
        if patched is None:
            return saved
        own = self._rank if patched.numel() > saved.numel() else 0  # this rank's slice of gathered rows
        return patched.detach().reshape(-1, *saved.shape)[own]


class StandIn:
    """A proxy of an object with some attributes replaced; attributes set on the proxy do not reach the object."""

    def __init__(self, target: Any, **replaced: Any) -> None:
        """Wrap `target`; the keyword arguments replace its attributes of these names."""
        vars(self).update(replaced, _stands_for=target)

    def __getattr__(self, name: str) -> Any:
        """Return the target's attribute."""
        return getattr(vars(self)["_stands_for"], name)


@contextmanager
def leaving_no_trace(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and `device` on exit, and lend Megatron another global buffer inside."""
    state: Any = importlib.import_module("megatron.core.parallel_state")
    buffer = state._GLOBAL_MEMORY_BUFFER
    devices = [] if device.type == "cpu" else [device.index]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        if buffer is not None:
            state._GLOBAL_MEMORY_BUFFER = type(buffer)()
        try:
            yield
        finally:
            state._GLOBAL_MEMORY_BUFFER = buffer
