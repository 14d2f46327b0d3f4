"""Calls of Megatron-core's linear layers that are checked beside its own code.

A weight gradient may go to main_grad, or be deferred.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.check import CheckedCall, CheckedLinear, Gradient, Gradients
from ascend_parallel.patches.megatron.original import Forward, original_linear


def beside_original(linear: CheckedLinear, run: Callable[[Begin | None], Any], original: Forward) -> CheckedCall:
    """Return a call, which `run` runs, beside Megatron-core's own forward on a stand-in for the layer, x and weight."""
    by_original = functools.partial(original_linear, linear.layer, original)
    return linear.beside(by_original, run, gradients=WeightGradients(linear.layer, linear.weight))


class WeightGradients(Gradients):
    """Reads the gradients of a linear layer, whose weight's may go to main_grad, or be deferred."""

    def __init__(self, layer: Any, weight: Any) -> None:
        """Read the gradients of a call that multiplies with `weight`."""
        self._layer, self._weight = layer, weight
        self._main_grad: Any = None
        self._before: torch.Tensor | None = None
        self._deferred_before = 0

    def begin(self) -> None:
        """Copy main_grad, and count the deferred gradients."""
        self._deferred_before = _deferred(self._layer)
        fused = self._layer.gradient_accumulation_fusion and self._weight.requires_grad
        self._main_grad = getattr(self._weight, "main_grad", None) if fused else None
        self._before = None if self._main_grad is None else self._main_grad.clone()

    def read(self, name: str, gradient: torch.Tensor | None) -> Gradient | str:
        """Return an operand's gradient: that of a weight may be the change of main_grad; or why it cannot be known."""
        if name != "weight":
            return gradient, 0.0
        main_grad, before, self._main_grad, self._before = self._main_grad, self._before, None, None
        if _deferred(self._layer) > self._deferred_before:
            return "is deferred (defer_embedding_wgrad_compute)"
        if not self._layer.gradient_accumulation_fusion:
            return gradient, 0.0
        if hasattr(self._weight, "__fsdp_param__"):
            return "goes to a buffer of Megatron-FSDP"
        if main_grad is None or before is None:
            return "has no main_grad to go to"
        if self._weight.main_grad is not main_grad:
            return "went to another main_grad than the weight had before"
        if not math.isfinite(magnitude := _magnitude(before)):
            return "was added to a main_grad that was not finite"
        wide = torch.promote_types(main_grad.dtype, torch.float32)
        return main_grad.to(wide) - before, torch.finfo(main_grad.dtype).eps * magnitude


def _deferred(layer: Any) -> int:
    """Return the number of the layer's deferred weight gradients."""
    return len(getattr(layer, "grad_output_buffer", None) or ())


def _magnitude(tensor: torch.Tensor) -> float:
    return max(float(bound.abs()) for bound in torch.aminmax(tensor))
