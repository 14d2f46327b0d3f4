"""Accumulate a weight gradient as Megatron-core does.

Without gradient accumulation fusion the gradient is returned. With fusion the gradient is added to
``weight.main_grad``; if DDP counts hooks (``grad_added_to_main_grad``), a dummy gradient is returned to fire them.
With a deferred embedding gradient, dy is kept for the pipeline's drain phase.
Source: megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ascend_parallel.ops.arithmetic import Product
from ascend_parallel.overlap.weight_gradient import Begin, GradientParts, WeightGradient


class MegatronWeightGradient(WeightGradient):
    """The destination of the weight gradient of a layer's call."""

    def __init__(
        self,
        weight: Any,
        *,
        fused: bool,
        layers: ModuleType,
        main_grad_at_forward: bool,
        postponed: tuple[list[torch.Tensor], int] | None,
        begin: Begin | None,
    ) -> None:
        """Hold the destination.

        weight
            The parameter itself: Megatron uses its attributes.
        layers
            The module that holds the fused kernel, if any.
        postponed
            Collects dy whose weight gradient is deferred, and the most of them (0: unlimited); None: none is.
        begin
            Observes the backward of a call that is checked; None for other calls.
        """
        self.begin = begin
        self._weight = weight
        self._fused = fused
        self._layers = layers
        self._main_grad = getattr(weight, "main_grad", None) if fused and main_grad_at_forward else None
        self._postponed = postponed

    def postpone(self, dy: torch.Tensor) -> bool:
        """Keep dy and return True if the embedding's weight gradient is deferred and the list has room."""
        output_gradients, limit = self._postponed or ([], 0)
        if self._postponed is None or (limit and len(output_gradients) >= limit):
            return False
        output_gradients.append(dy)
        return True

    def placeholder(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the dummy gradient that Megatron returns for a fused gradient; None without fusion."""
        return _dummy(self._weight, x) if self._fused else None

    @property
    def is_product(self) -> bool:
        """Whether the gradient is returned to autograd, and multiplied as `WeightGradient` does."""
        return type(self) is MegatronWeightGradient and not self._fused

    @property
    def may_come_later(self) -> bool:
        """Whether the gradient is returned to autograd, not added to main_grad."""
        return not self._fused

    def compute(
        self,
        x_m: torch.Tensor,
        dy_m: torch.Tensor,
        out: torch.Tensor | None = None,
        product: Product | None = None,
    ) -> torch.Tensor | None:
        """Return ``dw = dy_m.t() @ x_m`` [N, K]; with fusion add dw to main_grad and return the dummy."""
        if not self._fused:
            return super().compute(x_m, dy_m, out, product)
        weight = self._weight
        self._place_main_grad()
        if hasattr(weight, "__fsdp_param__"):
            weight.main_grad = weight.get_main_grad()
            if product is None:
                torch.matmul(dy_m.t(), x_m, out=weight.main_grad)
            else:
                weight.main_grad.copy_(product(x_m, dy_m))
        elif product is None:
            self._accumulate(x_m, dy_m)
        else:  # Megatron's CUDA extension multiplies whole
            weight.main_grad.add_(product(x_m, dy_m))
        return _dummy(weight, x_m)

    def parts(self) -> GradientParts:
        """Return the function that sums the gradient part by part; with fusion every part is added to main_grad."""
        if not self._fused:
            return super().parts()
        self._place_main_grad()
        if hasattr(self._weight, "__fsdp_param__"):  # its main_grad is written, not added to
            return _WrittenParts(self._weight)
        return _MainGradParts(self._weight, self._accumulate)

    def _place_main_grad(self) -> None:
        if self._main_grad is not None:
            self._weight.main_grad = self._main_grad

    def _accumulate(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> None:
        main_grad = self._weight.main_grad
        kernel = getattr(self._layers, "fused_weight_gradient_mlp_cuda", None)
        if kernel is None:  # a device without Megatron's CUDA extension
            main_grad.add_(dy_m.t().matmul(x_m))
        elif main_grad.dtype == torch.float32:
            kernel.wgrad_gemm_accum_fp32(x_m, dy_m, main_grad)
        elif main_grad.dtype in (torch.float16, torch.bfloat16):
            kernel.wgrad_gemm_accum_fp16(x_m, dy_m, main_grad)
        else:
            raise RuntimeError(
                f"main_grad is {main_grad.dtype}; Megatron-core's fusion allows float32, float16, bfloat16"
            )


class _MainGradParts(GradientParts):
    """Adds every part to main_grad."""

    def __init__(self, weight: Any, accumulate: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Hold the parameter, and what adds to its main_grad."""
        super().__init__()
        self._weight, self._accumulate = weight, accumulate
        self._last: torch.Tensor | None = None

    def _add(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> None:
        self._accumulate(x_m, dy_m)
        self._last = x_m

    @property
    def begun(self) -> bool:
        return self._last is not None

    def total(self) -> torch.Tensor | None:
        return None if self._last is None else _dummy(self._weight, self._last)


class _WrittenParts(GradientParts):
    """Writes the sum of all parts to main_grad."""

    def __init__(self, weight: Any) -> None:
        """Hold the parameter."""
        super().__init__()
        self._weight = weight

    def total(self) -> torch.Tensor | None:
        total = super().total()
        if total is None:
            return None
        self._weight.main_grad = self._weight.get_main_grad()
        self._weight.main_grad.copy_(total)
        return _dummy(self._weight, total)


def _dummy(weight: Any, x_m: torch.Tensor) -> torch.Tensor | None:
    """Return an unused gradient that makes DDP's hooks run on the main backward thread, or None without DDP."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    weight.grad_added_to_main_grad = True
    return make(weight.main_grad.shape, dtype=x_m.dtype, device=x_m.device)
