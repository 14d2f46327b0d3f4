"""Megatron-core's own forward and backward of one call, run beside a patched layer without leaving a trace.

It runs on aliases of the same input and weight. Its weight gradient is returned instead of accumulated,
its gradients go nowhere else, and buffers and random states are afterwards as they were.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ascend_parallel.ops.operators import without_autocast
from ascend_parallel.overlap.linear import cast_by_autocast

Output = tuple[torch.Tensor, torch.Tensor | None]
Forward = Callable[[Any, torch.Tensor, torch.Tensor], Output]


class Original:
    """One call of a layer as Megatron-core computes it."""

    def __init__(self, layer: Any, x: torch.Tensor, weight: torch.Tensor, rank: int) -> None:
        """Take aliases of x and weight, cast as autocast casts them, which want the gradients that those want.

        `rank` is this one's in the layer's group.
        """
        self._rank = rank
        self._x, self._weight = (cast_by_autocast(operand).detach() for operand in (x, weight))
        if torch.is_grad_enabled():
            self._x.requires_grad_(x.requires_grad)
            self._weight.requires_grad_(weight.requires_grad)
        self._layer = StandIn(
            layer,
            weight=self._weight,
            # In the operands' dtype too: the original's backward under CPU autocast takes no other.
            bias=None if layer.bias is None else cast_by_autocast(layer.bias).detach(),
            gradient_accumulation_fusion=False,
            config=StandIn(layer.config, defer_embedding_wgrad_compute=False),
        )
        self._output: GradientEdge | None = None
        self._begun: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def forward(self, forward: Forward) -> torch.Tensor:
        """Return the output; of its graph only what a backward needs is kept, which is x and the weight."""
        with leaving_no_trace(self._x.device), saved_tensors_hooks(self._keep, self._give):
            y = without_autocast(forward)(self._layer, self._x, self._weight)[0]
        self._output = get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def backward(
        self, dy: torch.Tensor, kept: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of input and weight, None for one that is not wanted; once.

        `kept` and `weight` are what the patched layer's backward began with: hooks of the run may have given back
        others than were saved, and the weight's data may have been replaced since forward.
        """
        assert self._output is not None
        self._begun = kept, weight
        wanted = [alias for alias in (self._x, self._weight) if alias.requires_grad]
        with leaving_no_trace(self._x.device):
            gradients = iter(torch.autograd.grad([self._output], wanted, [dy], allow_unused=True))
        dx, dw = (next(gradients) if alias.requires_grad else None for alias in (self._x, self._weight))
        return dx, dw

    def _keep(self, saved: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Save a tensor as it is, past the hooks of the run, which count and move what is saved; is it the weight?"""
        return saved, saved.data_ptr() == self._weight.data_ptr() and saved.shape == self._weight.shape

    def _give(self, kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
        """Give what the patched layer's backward began with in place of x [S, ..., K] or the weight, if it had them."""
        saved, is_weight = kept
        begun = self._begun[is_weight]
        if begun is None:
            return saved
        own = self._rank if begun.numel() > saved.numel() else 0  # of gathered rows this rank's
        return begun.detach().reshape(-1, *saved.shape)[own]


class StandIn:
    """Has the attributes of another object, some of them replaced; what is set on it stays on it."""

    def __init__(self, other: Any, **replaced: Any) -> None:
        """Stand in for `other`."""
        vars(self).update(replaced, _stands_for=other)

    def __getattr__(self, name: str) -> Any:
        """Return what was not replaced."""
        return getattr(vars(self)["_stands_for"], name)


@contextmanager
def leaving_no_trace(device: torch.device) -> Iterator[None]:
    """Put back the random states of the CPU and `device`, and lend Megatron another global buffer, for a while."""
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
