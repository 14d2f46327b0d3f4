"""Compare the tail of a layer's region, and the linear layers beside it, with Megatron-core's own code.

The tail is addition and norm; its record has the name of the norm. linear_proj before it and linear_qkv behind it are
linear layers whose rows a region takes or hands over: their checks are those of linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.tail import Add
from ascend_parallel.patches.check import Check
from ascend_parallel.patches.megatron.check import MegatronCall, MegatronCheck
from ascend_parallel.patches.megatron.original import StandIn
from ascend_parallel.patches.megatron.region_verification import PartCall, in_region


@dataclass(frozen=True, kw_only=True)
class TailCall(PartCall):
    """A call of a tail: `layer` is the norm, `x` the result y of the row-parallel layer.

    linear
        The row-parallel layer.
    bias, residual
        What is added to y; None: no bias.
    add
        Megatron-core's own addition.
    """

    linear: Any
    bias: torch.Tensor | None
    residual: torch.Tensor
    add: Add

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The terms of the sum, and the parameters of the norm."""
        named = {"input": self.x, "bias": self.bias, "residual input": self.residual}
        named |= {f"norm {name}": parameter for name, parameter in self.layer.named_parameters()}
        return {name: operand for name, operand in named.items() if operand is not None}

    @property
    def communicates(self) -> Any:
        """The layer whose group the call uses."""
        return self.linear

    def results(self, returned: Any) -> dict[str, torch.Tensor]:
        """Return the sum and what the norm makes of it."""
        return dict(zip(("sum output", "norm output"), returned, strict=True))

    def by_original(self, operands: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return what Megatron-core's own addition and norm compute."""
        own = {name: operands[f"norm {name}"] for name, _ in self.layer.named_parameters()}
        # Without gradients Megatron-core adds in place.
        y, bias, residual = operands["input"].clone(), operands.get("bias"), operands["residual input"]
        added = self.add(y, bias, residual)
        return [added, type(self.layer).forward(StandIn(self.layer, **own), added)]


@dataclass(frozen=True, kw_only=True)
class LinearCall(MegatronCall):
    """A call of a linear layer in the chunks of a region."""

    cut: RegionCut

    def check(self, group: dist.ProcessGroup, number: int, limit: float | None) -> Check:
        """Return the check of this call."""
        return LinearCheck(self, group, number, limit)


class LinearCheck(MegatronCheck):
    """The check of a call of a linear layer in the chunks of a region."""

    def __init__(self, call: LinearCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Prepare the check; arguments as those of `Check`."""
        super().__init__(call, group, number, limit)
        self._cut = call.cut

    def _operators(self, direction: str) -> str:
        return in_region(direction, self._cut) if direction == "forward" else super()._operators(direction)
