"""Compare an MLP that ran as a region with Megatron-core's own MLP.forward, matmuls and collectives included.

The region runs on the run's own operands, and the node of its autograd function gives its gradients. The reference
runs twice on aliases: without gradients beside the forward, and with gradients beside the backward, so that nothing
but the input is held in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.check import Check, LayerCall, Pair
from ascend_parallel.patches.megatron.check import MegatronCall, MegatronCheck
from ascend_parallel.patches.megatron.original import StandIn, leaving_no_trace


@dataclass(frozen=True, kw_only=True)
class RegionCall(MegatronCall):
    """A call of an MLP, the `layer`, as a region; `weight` is fc2's.

    cut
        The chunks of the region.
    whole
        Megatron-core's own MLP.forward.
    """

    cut: RegionCut
    whole: Function

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The input and the parameters of the region, by what their gradients are called."""
        fc1 = self.layer.linear_fc1
        named = {"input": self.x, "linear_fc1 weight": fc1.weight, "linear_fc1 bias": fc1.bias}
        named["linear_fc2 weight"] = self.weight
        return {name: operand for name, operand in named.items() if operand is not None}

    @property
    def graded(self) -> bool:
        """Whether a backward can follow."""
        return torch.is_grad_enabled() and any(operand.requires_grad for operand in self.operands.values())

    @property
    def communicates(self) -> Any:
        """The layer whose group the call uses."""
        return self.layer.linear_fc2

    def check(self, group: dist.ProcessGroup, number: int, limit: float | None) -> Check:
        """Return the check of this call."""
        return RegionCheck(self, group, number, limit)


class RegionCheck(MegatronCheck):
    """The check of a call of a region."""

    def __init__(self, call: RegionCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Prepare the check; arguments as those of `Check`."""
        super().__init__(call, group, number, limit)
        self._call: RegionCall | None = call
        self._cut, self._mlp = call.cut, call.layer
        self._record.region = True
        self._main_grads: dict[str, tuple[Any, Any]] = {}

    def _compare(self, call: LayerCall, y: torch.Tensor) -> None:
        """Compare the region's output with the original's, and hook its backward."""
        assert self._call is not None
        with torch.no_grad(), leaving_no_trace(call.x.device):
            expected = _whole(self._call, {name: x.detach() for name, x in self._call.operands.items()})
        self._judge("forward", {"output": (y.detach(), expected, 0.0)})
        if self._graded:
            assert y.grad_fn is not None
            y.grad_fn.register_hook(self._compare_gradients)

    def _begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Keep copies of both main_grads; called when the region's backward starts."""
        if self._call is None:
            return
        for name, linear in self._linears().items():
            fused = linear.gradient_accumulation_fusion and linear.weight.requires_grad
            main = getattr(linear.weight, "main_grad", None) if fused else None
            self._main_grads[name] = main, None if main is None else main.clone()

    def _linears(self) -> dict[str, Any]:
        return {f"{name} weight": getattr(self._mlp, name) for name in ("linear_fc1", "linear_fc2")}

    def _compare_gradients(self, found: Sequence[torch.Tensor | None], dy: Sequence[torch.Tensor | None]) -> None:
        """Run the original forward and backward, and compare its gradients with those of the region."""
        call, self._call = self._call, None
        if call is None or dy[0] is None:  # a second backward of a retained graph
            return
        aliases = {name: x.detach().requires_grad_(x.requires_grad) for name, x in call.operands.items()}
        wanted = {name: alias for name, alias in aliases.items() if alias.requires_grad}
        with (
            torch.enable_grad(),
            leaving_no_trace(call.x.device),
            saved_tensors_hooks(lambda saved: saved, lambda saved: saved),  # hidden from the run's own
        ):
            y = _whole(call, aliases)
            expected = torch.autograd.grad([y], list(wanted.values()), [dy[0].detach()])
        by_region = dict(zip(aliases, found, strict=True))
        pairs: dict[str, Pair] = {}
        for name, by_original in zip(wanted, expected, strict=True):
            gradient, rounding, known = by_region[name], 0.0, True
            if name in self._main_grads:
                gradient, rounding, known = self._accumulated(name, gradient)
            if known:
                gradient = torch.zeros_like(by_original) if gradient is None else gradient
                pairs[f"{name} gradient"] = (gradient, by_original, rounding)
        self._main_grads.clear()
        self._judge("backward", pairs)

    def _accumulated(self, name: str, dw: torch.Tensor | None) -> tuple[torch.Tensor | None, float, bool]:
        """Return a weight gradient, its largest rounding error, and whether it is known."""
        linear = self._linears()[name]
        self._layer, self._weight = linear, linear.weight
        self._main_grad, self._before = self._main_grads[name]
        gradient = self._weight_gradient(dw)
        return (None, 0.0, False) if gradient is None else (*gradient, True)

    def _where(self) -> str:
        return "region, sequence parallel" if self._mlp.linear_fc2.sequence_parallel else "region"

    def _operands(self) -> str:
        weights = " and ".join(str(list(linear.weight.shape)) for linear in self._linears().values())
        return f"input {list(self._shape)}, weights {weights}, {self._dtype}"

    def _operators(self, direction: str) -> str:
        return f"Its {direction} ran as a region in chunks of rows {list(self._cut.sizes)} ({self._cut.reason})"


def _whole(call: RegionCall, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of Megatron-core's own MLP on `operands`, with its own matmuls and collectives."""
    layers = {}
    for name in ("linear_fc1", "linear_fc2"):
        layer = getattr(call.layer, name)
        layers[name] = StandIn(
            layer,
            weight=operands[f"{name} weight"],
            bias=operands.get(f"{name} bias"),
            gradient_accumulation_fusion=False,
        )
    fc1, fc2 = (type(getattr(call.layer, name)).forward.__wrapped__ for name in layers)
    mlp = StandIn(
        call.layer,
        linear_fc1=lambda x: fc1(layers["linear_fc1"], x),
        linear_fc2=lambda a: fc2(layers["linear_fc2"], a),
    )
    output: torch.Tensor = call.whole(mlp, operands["input"])[0]
    return output
