"""Calls of Megatron-core's linear layers that are checked beside its own code.

A weight gradient may go to main_grad, or be deferred.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.check import (
    CheckedCall,
    Gradient,
    Gradients,
    LinearOperators,
    OperatorsRan,
    Tensors,
    linear_operands,
    linear_path,
)
from ascend_parallel.patches.megatron.original import Forward, original_linear
from ascend_parallel.settings import Settings

Run = Callable[[Begin | None], Any]


class WeightGradients(Gradients):
    """Reads weight gradients that may go to main_grad, or be deferred."""

    def __init__(self, **weights: tuple[Any, Any]) -> None:
        """Read the gradients of `weights`: by the operand's name the layer and the weight that it multiplies with."""
        self._weights = weights
        self._main_grads: dict[str, tuple[Any, Any]] = {}
        self._deferred_before: dict[str, int] = {}

    def begin(self) -> None:
        """Copy each main_grad, and count the deferred gradients."""
        for name, (layer, weight) in self._weights.items():
            self._deferred_before[name] = _deferred(layer)
            fused = layer.gradient_accumulation_fusion and weight.requires_grad
            main_grad = getattr(weight, "main_grad", None) if fused else None
            self._main_grads[name] = main_grad, None if main_grad is None else main_grad.clone()

    def read(self, name: str, gradient: torch.Tensor | None) -> Gradient | str:
        """Return an operand's gradient: that of a weight may be the change of main_grad; or why it cannot be known."""
        if name not in self._weights:
            return gradient, 0.0
        layer, weight = self._weights[name]
        main_grad, before = self._main_grads.pop(name, (None, None))
        if _deferred(layer) > self._deferred_before.get(name, 0):
            return "is deferred (defer_embedding_wgrad_compute)"
        if not layer.gradient_accumulation_fusion:
            return gradient, 0.0
        if hasattr(weight, "__fsdp_param__"):
            return "goes to a buffer of Megatron-FSDP"
        if main_grad is None or before is None:
            return "has no main_grad to go to"
        if weight.main_grad is not main_grad:
            return "went to another main_grad than the weight had before"
        if not math.isfinite(magnitude := _magnitude(before)):
            return "was added to a main_grad that was not finite"
        wide = torch.promote_types(main_grad.dtype, torch.float32)
        return main_grad.to(wide) - before, torch.finfo(main_grad.dtype).eps * magnitude


@dataclass(frozen=True, kw_only=True)
class MegatronLinear:
    """A call of a linear layer of Megatron-core.

    kind
        "column" or "row".
    x, weight
        What the layer multiplies.
    original
        Runs Megatron-core's own forward on a stand-in for the layer, x and weight.
    settings
        Returns the operators' settings; called after the layer, when this needs no communication.
    reduces
        Whether the input gradient of a column layer is summed.
    """

    layer: Any
    kind: str
    x: torch.Tensor
    weight: torch.Tensor
    original: Forward
    settings: Callable[[], Settings]
    sequence_parallel: bool
    reduces: bool = True

    def checked(self, group: dist.ProcessGroup, run: Run) -> CheckedCall:
        """Return the call, which `run` runs and returns as output and bias, beside Megatron-core's own."""
        return CheckedCall(
            layer=self.layer,
            path=linear_path(self.kind, self.sequence_parallel),
            group=group,
            operands={"input": self.x, "weight": self.weight},
            run=run,
            results=lambda returned: {"output": returned[0]},
            original=self._by_original,
            operators=lambda: self._operators(group),
            gradients=WeightGradients(weight=(self.layer, self.weight)),
            backward_operands=functools.partial(linear_operands, self.x.shape, group.rank()),
        )

    def _by_original(self, operands: Tensors) -> Tensors:
        return {"output": original_linear(self.layer, self.original, operands["input"], operands["weight"])}

    def _operators(self, group: dist.ProcessGroup) -> OperatorsRan:
        return LinearOperators(
            layer=self.layer,
            kind=self.kind,
            x=self.x,
            weight=self.weight,
            group=group,
            settings=self.settings(),
            dtype=operand_dtype(self.x),
            sequence_parallel=self.sequence_parallel,
            reduces=self.reduces,
        )


def _deferred(layer: Any) -> int:
    """Return the number of the layer's deferred weight gradients."""
    return len(getattr(layer, "grad_output_buffer", None) or ())


def _magnitude(tensor: torch.Tensor) -> float:
    return max(float(bound.abs()) for bound in torch.aminmax(tensor))
