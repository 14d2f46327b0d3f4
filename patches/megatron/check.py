"""Calls of Megatron-core's linear layers, and of the parts of a region, that are checked beside its own code.

A weight gradient may go to main_grad, or be deferred. The parts of a layer's region are its MLP, its two tails
(addition and norm; the record has the name of the norm) and the linear layers whose rows the region takes or hands
over: linear_proj and the next layer's linear_qkv.
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
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.tail import Add
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.base import Function
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
from ascend_parallel.patches.megatron.original import AttributeOverlay, Forward, original_linear
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
    cut
        The chunks of the region that the layer's forward is a part of; None: of none.
    """

    layer: Any
    kind: str
    x: torch.Tensor
    weight: torch.Tensor
    original: Forward
    settings: Callable[[], Settings]
    sequence_parallel: bool
    reduces: bool = True
    cut: RegionCut | None = None

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
        linear = LinearOperators(
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
        cut = self.cut
        return linear if cut is None else lambda way: in_region(cut, way) if way == "forward" else linear(way)


def in_region(cut: RegionCut, direction: str) -> str:
    """Return a sentence about a pass with the chunks of its region."""
    return f"Its {direction} ran as a region in chunks of rows {list(cut.sizes)} ({cut.reason})"


def checked_mlp(
    mlp: Any, original: Function, hidden: torch.Tensor, cut: RegionCut, group: dist.ProcessGroup, run: Run
) -> CheckedCall:
    """Return a call of an MLP as a region, beside Megatron-core's `original` with its own matmuls and collectives."""
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    operands = {"input": hidden, "linear_fc1 weight": fc1.weight}
    if fc1.bias is not None:
        operands["linear_fc1 bias"] = fc1.bias
    operands["linear_fc2 weight"] = fc2.weight

    def by_original(operands: Tensors) -> Tensors:
        linears = {name: _own_linear(getattr(mlp, name), name, operands) for name in ("linear_fc1", "linear_fc2")}
        return {"output": original(AttributeOverlay(mlp, **linears), operands["input"])[0]}

    return CheckedCall(
        layer=mlp,
        path=linear_path("region", fc2.sequence_parallel),
        group=group,
        operands=operands,
        run=run,
        results=lambda returned: {"output": returned[0]},  # fc2's bias is not in it
        original=by_original,
        operators=lambda: functools.partial(in_region, cut),
        gradients=WeightGradients(**{"linear_fc1 weight": (fc1, fc1.weight), "linear_fc2 weight": (fc2, fc2.weight)}),
        region=True,
    )


def _own_linear(layer: Any, name: str, operands: Tensors) -> Function:
    """Return what runs Megatron-core's own forward of the linear layer `name` on its `operands`."""
    weight, bias = operands[f"{name} weight"], operands.get(f"{name} bias")
    stand_in = AttributeOverlay(layer, weight=weight, bias=bias, gradient_accumulation_fusion=False)
    return functools.partial(type(layer).forward.__wrapped__, stand_in)


@dataclass(frozen=True, kw_only=True)
class TailOperands:
    """What a tail adds, and the norm of the sum.

    linear
        The row-parallel layer whose result is y.
    bias, residual
        What is added to y; None: no bias.
    add
        Megatron-core's own addition.
    """

    linear: Any
    norm: Any
    y: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor
    add: Add

    def named(self) -> dict[str, torch.Tensor]:
        """Return the terms of the sum, and the parameters of the norm, by name."""
        named = {"input": self.y, "bias": self.bias, "residual input": self.residual}
        named |= {f"norm {name}": parameter for name, parameter in self.norm.named_parameters()}
        return {name: operand for name, operand in named.items() if operand is not None}

    def by_original(self, operands: Tensors) -> Tensors:
        """Return what Megatron-core's own addition and norm compute."""
        parameters = {name: operands[f"norm {name}"] for name, _ in self.norm.named_parameters()}
        # Without gradients Megatron-core adds in place.
        added = self.add(operands["input"].clone(), operands.get("bias"), operands["residual input"])
        normed = type(self.norm).forward(AttributeOverlay(self.norm, **parameters), added)
        return {"sum output": added, "norm output": normed}


def checked_tail(tail: TailOperands, cut: RegionCut, group: dist.ProcessGroup, run: Run) -> CheckedCall:
    """Return a call of a tail, which `run` runs and returns as sum and norm, beside Megatron-core's own code."""
    return CheckedCall(
        layer=tail.norm,
        path=linear_path("addition and norm", tail.linear.sequence_parallel),
        group=group,
        operands=tail.named(),
        run=run,
        results=lambda returned: dict(zip(("sum output", "norm output"), returned, strict=True)),
        original=tail.by_original,
        operators=lambda: functools.partial(in_region, cut),
    )


def _deferred(layer: Any) -> int:
    """Return the number of the layer's deferred weight gradients."""
    return len(getattr(layer, "grad_output_buffer", None) or ())


def _magnitude(tensor: torch.Tensor) -> float:
    return max(float(bound.abs()) for bound in torch.aminmax(tensor))
