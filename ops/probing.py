"""What the probes of bits share: operands that show an order of sums, and work that is no part of the user's call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from ascend_parallel.ops.problem import Problem

# Memory layout of the right operand [K, N]: a transposed weight [N, K] (forward), a row-major weight (backward), or
# either (empty). A layer derives the layout from the pass, so that all ranks name the same.
TRANSPOSED, ROW_MAJOR, ANY = "transposed", "row_major", ""

# Number of distinct rows in an operand; a larger operand repeats them.
DRAWN_ROWS = 509


def cancelling_operands(problem: Problem, layout: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [M, K] and w [K, N] of a problem, w in a layout, whose product is 0 but for rounding; always the same.

    Each number of x stands twice in its row, and the two products have unlike signs, at places that are drawn. So the
    sum that a routine returns is the rounding of its own order of additions. Of random operands the same numbers
    would hide it: a sum of K products in fp32, rounded to 16 bits, is mostly the same in any order.
    """
    # On the device: a copy from the host may wait for a collective in flight, which waits for ranks that probe too.
    generator = torch.Generator(device).manual_seed(0)
    m, k, n = problem.m, problem.k, problem.n
    places = torch.randperm(k, generator=generator, device=device)

    def drawn(rows: int, sign: int) -> torch.Tensor:
        shape = max(1, min(rows, DRAWN_ROWS)), k // 2
        numbers = torch.randn(shape, generator=generator, device=device).to(problem.dtype)
        left_over = numbers.new_zeros(shape[0], k % 2)
        base = torch.cat([numbers, sign * numbers, left_over], 1).index_select(1, places)
        return base.repeat(-(-rows // shape[0]), 1)[:rows].contiguous()

    x, w_t = drawn(m, 1), drawn(n, -1)
    return x, w_t.t() if layout == TRANSPOSED else w_t.t().contiguous()


@contextmanager
def without_grad_and_modes(inference: bool = False) -> Iterator[None]:
    """Disable autograd, dispatch and function modes, and autocast: for work outside of the user's call.

    inference: whether the work runs in inference mode, where alone tensors of that mode may be written.
    What is not on is not switched off: torch's contexts take longer than a small operator.
    """
    with in_inference_mode(inference), torch.no_grad(), torch._C.DisableTorchFunction(), ExitStack() as stack:
        pre_dispatch = _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        if pre_dispatch or torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        for device in _autocast_devices():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_inference_mode(inference: bool) -> AbstractContextManager[object]:
    """Return a context that is in inference mode, or is not; to leave the mode turns autograd on."""
    return nullcontext() if torch.is_inference_mode_enabled() == inference else torch.inference_mode(inference)


@cache
def _autocast_devices() -> tuple[str, ...]:
    """Return the devices of this machine; autocast of an absent one fails: torch_npu may be there without an NPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
