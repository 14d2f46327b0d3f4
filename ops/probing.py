"""What the probes of bits share: random operands of a matmul, and work that is no part of the user's call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from ascend_parallel.ops.problem import Problem

# Memory layout of the right operand [K, N]: a transposed weight [N, K] (forward), a row-major weight (backward), or
# either (empty). A layer derives the layout from the pass, so that all ranks name the same.
TRANSPOSED, ROW_MAJOR, ANY = "transposed", "row_major", ""

# Number of distinct rows in a random operand; a larger operand repeats them.
DRAWN_ROWS = 509


def random_operands(problem: Problem, layout: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [M, K] and w [K, N] of a problem, w in a layout; the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        base = torch.randn(min(rows, DRAWN_ROWS), columns, generator=generator, device="cpu")
        repeated = base.to(device=device, dtype=problem.dtype).repeat(-(-rows // max(1, base.shape[0])), 1)
        return repeated[:rows].contiguous()

    m, k, n = problem.m, problem.k, problem.n
    return drawn(m, k), drawn(n, k).t() if layout == TRANSPOSED else drawn(k, n)


@contextmanager
def without_grad_and_modes() -> Iterator[None]:
    """Disable autograd, dispatch modes, function modes and autocast, for work that is no part of the user's call.

    What is not on is not switched off: torch's contexts take longer than a small operator.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), ExitStack() as stack:
        pre_dispatch = _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        if pre_dispatch or torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        for device in _autocast_devices():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@cache
def _autocast_devices() -> tuple[str, ...]:
    """Return the devices of this machine; autocast of an absent one fails: torch_npu may be there without an NPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
