"""Megatron-core's own code, run on other tensors and parts than those of the model, without side effects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascend_parallel.overlap.choices import cast_by_autocast

Output = tuple[torch.Tensor, torch.Tensor | None]
Forward = Callable[[Any, torch.Tensor, torch.Tensor], Output]


class AttributeOverlay:
    """A proxy of an object with some attributes replaced; attributes set on the proxy do not reach the object."""

    def __init__(self, target: Any, **replaced: Any) -> None:
        """Wrap `target`; the keyword arguments replace its attributes of these names."""
        vars(self).update(replaced, _stands_for=target)

    def __getattr__(self, name: str) -> Any:
        """Return the target's attribute."""
        return getattr(vars(self)["_stands_for"], name)


def original_linear(layer: Any, forward: Forward, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the output of the original `forward` of a linear layer on x and `weight`, which get the gradients.

    Operands are cast here as autocast casts them, also the bias: the original's backward under CPU autocast needs the
    operands' dtype.
    """
    x, weight = cast_by_autocast(x), cast_by_autocast(weight)
    bias = None if layer.bias is None else cast_by_autocast(layer.bias).detach()
    stand_in = AttributeOverlay(
        layer,
        weight=weight,
        bias=bias,
        gradient_accumulation_fusion=False,
        config=AttributeOverlay(layer.config, defer_embedding_wgrad_compute=False),
    )
    with torch.autocast(x.device.type, enabled=False):
        return forward(stand_in, x, weight)[0]


@contextmanager
def lent_buffer() -> Iterator[None]:
    """Lend Megatron-core another global buffer inside this context."""
    state: Any = importlib.import_module("megatron.core.parallel_state")
    buffer = state._GLOBAL_MEMORY_BUFFER
    if buffer is not None:
        state._GLOBAL_MEMORY_BUFFER = type(buffer)()
    try:
        yield
    finally:
        state._GLOBAL_MEMORY_BUFFER = buffer
