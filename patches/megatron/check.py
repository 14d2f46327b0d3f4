"""Compare a call of a patched layer with Megatron-core's own: the gradients that go to main_grad.

The weight gradient is read from autograd's edges, or as the change of main_grad. The original's backward starts from
the same tensors as the patched layer's backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.patches.check import Check, Gradient, LayerCall
from ascend_parallel.patches.megatron.original import Original, Output
from ascend_parallel.patches.reference import Reference


@dataclass(frozen=True, kw_only=True)
class MegatronCall(LayerCall):
    """A call of a patched layer of Megatron-core.

    original
        Runs Megatron-core's own forward on a stand-in for the layer, x and weight.
    """

    by: str = "megatron-core's own"

    def output(self, returned: Output) -> torch.Tensor:
        """Return the output of the pair of output and bias."""
        return returned[0]

    def reference(self, rank: int) -> Reference:
        """Return the original computation of this call."""
        return Original(self.layer, self.x, self.weight, rank, self.original)

    def check(self, group: dist.ProcessGroup, number: int, limit: float | None) -> Check:
        """Return the check of this call."""
        return MegatronCheck(self, group, number, limit)


class MegatronCheck(Check):
    """The check of a call whose weight gradient may go to main_grad, or be deferred."""

    def __init__(self, call: LayerCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Prepare the check; arguments as those of `Check`."""
        super().__init__(call, group, number, limit)
        self._main_grad: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._deferred_before = 0

    def _begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Keep the tensors from which the patched layer's backward starts, and a copy of main_grad."""
        super()._begin(kept, weight)
        if self._original is None:
            return
        self._deferred_before = self._deferred()
        if self._layer.gradient_accumulation_fusion and self._weight.requires_grad:
            self._main_grad = getattr(self._weight, "main_grad", None)
            self._before = None if self._main_grad is None else self._main_grad.clone()

    def _backward(self, original: Reference, dy: torch.Tensor) -> None:
        """Compare the gradients, and let go of main_grad."""
        super()._backward(original, dy)
        self._before, self._main_grad = None, None

    def _deferred(self) -> int:
        """Return the number of the layer's deferred weight gradients."""
        return len(getattr(self._layer, "grad_output_buffer", None) or ())

    def _weight_gradient(self, dw: torch.Tensor | None) -> Gradient | None:
        """Return the patched layer's weight gradient; None, with a note in the ledger, if it cannot be known."""
        if why := self._why_unknown():
            LEDGER.note(f"{self._record.layer}: the weight gradient {why} and is not checked", dist.get_rank())
            return None
        main, before = self._main_grad, self._before
        if main is None or before is None:
            return dw, 0.0
        wide = torch.promote_types(main.dtype, torch.float32)
        return main.to(wide) - before, torch.finfo(main.dtype).eps * _magnitude(before)

    def _why_unknown(self) -> str | None:
        """Return the reason why the weight gradient cannot be known, or None if it can."""
        if self._deferred() > self._deferred_before:
            return "is deferred (defer_embedding_wgrad_compute)"
        if not self._layer.gradient_accumulation_fusion:
            return None
        if hasattr(self._weight, "__fsdp_param__"):
            return "goes to a buffer of Megatron-FSDP"
        if self._main_grad is None or self._before is None:
            return "has no main_grad to go to"
        if self._weight.main_grad is not self._main_grad:
            return "went to another main_grad than the weight had before"
        return None if math.isfinite(_magnitude(self._before)) else "was added to a main_grad that was not finite"


def _magnitude(tensor: torch.Tensor) -> float:
    return max(float(bound.abs()) for bound in torch.aminmax(tensor))
