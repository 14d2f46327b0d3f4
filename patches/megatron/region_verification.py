"""Compare the parts of a region with Megatron-core's own code: an MLP, and what tail_verification.py adds.

A part runs on the run's own operands, and the node of its autograd function gives its gradients. The reference
runs twice on aliases: without gradients beside the forward, and with gradients beside the backward, so that nothing
but the operands is held in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.check import Check, Gradient, LayerCall
from ascend_parallel.patches.megatron.check import MegatronCall, MegatronCheck
from ascend_parallel.patches.megatron.original import StandIn, leaving_no_trace


@dataclass(frozen=True, kw_only=True)
class PartCall(MegatronCall):
    """A call of a part of a region that is one autograd function; all its results and gradients are compared.

    cut
        The chunks of the region.
    """

    cut: RegionCut

    @property
    @abstractmethod
    def operands(self) -> dict[str, torch.Tensor]:
        """The tensors that the function takes, in its order, by what their gradients are called."""

    @abstractmethod
    def results(self, returned: Any) -> dict[str, torch.Tensor]:
        """Return the function's results by name, from what `patched` returned."""

    @abstractmethod
    def by_original(self, operands: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the results that Megatron-core's own code computes from `operands`."""

    @property
    def graded(self) -> bool:
        """Whether a backward can follow."""
        return torch.is_grad_enabled() and any(operand.requires_grad for operand in self.operands.values())

    def check(self, group: dist.ProcessGroup, number: int, limit: float | None) -> Check:
        """Return the check of this call."""
        return PartCheck(self, group, number, limit)


class PartCheck(MegatronCheck):
    """The check of a call of a part of a region."""

    def __init__(self, call: PartCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Prepare the check; arguments as those of `Check`."""
        super().__init__(call, group, number, limit)
        self._call: PartCall | None = call
        self._cut = call.cut

    def _compare(self, call: LayerCall, returned: Any) -> None:
        """Compare the results with the original's, and hook the backward."""
        assert self._call is not None
        results = self._call.results(returned)
        with torch.no_grad(), leaving_no_trace(call.x.device):
            expected = self._call.by_original({name: x.detach() for name, x in self._call.operands.items()})
        pairs = zip(results.items(), expected, strict=True)
        self._judge("forward", {name: (found.detach(), by_original, 0.0) for (name, found), by_original in pairs})
        if self._graded:
            node = next(iter(results.values())).grad_fn
            assert node is not None
            node.register_hook(self._compare_gradients)

    def _compare_gradients(self, found: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
        """Run the original forward and backward, and compare its gradients with those of the part."""
        call, self._call = self._call, None
        if call is None or all(each is None for each in given):  # a second backward of a retained graph
            return
        aliases = {name: x.detach().requires_grad_(x.requires_grad) for name, x in call.operands.items()}
        wanted = {name: alias for name, alias in aliases.items() if alias.requires_grad}
        with (
            torch.enable_grad(),
            leaving_no_trace(call.x.device),
            saved_tensors_hooks(lambda saved: saved, lambda saved: saved),  # hidden from the run's own
        ):
            pairs = zip(call.by_original(aliases), given, strict=True)
            results = [(result, each.detach()) for result, each in pairs if each is not None]
            expected = torch.autograd.grad(
                *([result for result, _ in results], list(wanted.values()), [each for _, each in results]),
                allow_unused=True,
                materialize_grads=True,
            )
        by_part, judged = dict(zip(aliases, found, strict=True)), {}
        for name, by_original in zip(wanted, expected, strict=True):
            if (gradient := self._found(name, by_part[name])) is not None:
                value, rounding = gradient
                value = torch.zeros_like(by_original) if value is None else value
                judged[f"{name} gradient"] = (value, by_original, rounding)
        self._judge("backward", judged)

    def _found(self, name: str, gradient: torch.Tensor | None) -> Gradient | None:
        """Return a gradient of the part and its largest rounding error; None if it cannot be known."""
        return gradient, 0.0

    def _where(self) -> str:
        return f"{self._path}, sequence parallel" if self._sequence_parallel else self._path

    def _operators(self, direction: str) -> str:
        return in_region(direction, self._cut)


def in_region(direction: str, cut: RegionCut) -> str:
    """Return a sentence about a pass with the chunks of its region."""
    return f"Its {direction} ran as a region in chunks of rows {list(cut.sizes)} ({cut.reason})"


@dataclass(frozen=True, kw_only=True)
class RegionCall(PartCall):
    """A call of an MLP, the `layer`, as a region; `weight` is fc2's.

    whole
        Megatron-core's own MLP.forward.
    """

    whole: Function

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The input and the parameters of the region."""
        fc1 = self.layer.linear_fc1
        named = {"input": self.x, "linear_fc1 weight": fc1.weight, "linear_fc1 bias": fc1.bias}
        named["linear_fc2 weight"] = self.weight
        return {name: operand for name, operand in named.items() if operand is not None}

    @property
    def communicates(self) -> Any:
        """The layer whose group the call uses."""
        return self.layer.linear_fc2

    def results(self, returned: Any) -> dict[str, torch.Tensor]:
        """Return the output; fc2's bias is not in it."""
        return {"output": self.output(returned)}

    def by_original(self, operands: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the output of Megatron-core's own MLP, with its own matmuls and collectives."""
        return [_whole(self, operands)]

    def check(self, group: dist.ProcessGroup, number: int, limit: float | None) -> Check:
        """Return the check of this call."""
        return RegionCheck(self, group, number, limit)


class RegionCheck(PartCheck):
    """The check of a call of an MLP."""

    def __init__(self, call: RegionCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Prepare the check; arguments as those of `Check`."""
        super().__init__(call, group, number, limit)
        self._mlp = call.layer
        self._record.region = True
        self._main_grads: dict[str, tuple[Any, Any]] = {}

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

    def _found(self, name: str, gradient: torch.Tensor | None) -> Gradient | None:
        """Return a gradient; that of a weight may be the change of main_grad, None if it cannot be known."""
        if name not in self._main_grads:
            return gradient, 0.0
        linear = self._linears()[name]
        self._layer, self._weight = linear, linear.weight
        self._main_grad, self._before = self._main_grads.pop(name)
        return self._weight_gradient(gradient)

    def _operands(self) -> str:
        weights = " and ".join(str(list(linear.weight.shape)) for linear in self._linears().values())
        return f"input {list(self._shape)}, weights {weights}, {self._dtype}"


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
