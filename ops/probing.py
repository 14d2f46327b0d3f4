"""The probe of bits on this machine: whether a product in pieces has the bits of the whole product.

Its operands show in which order a routine adds, and its work is no part of the user's call. Every caller asks
`first_with_same_bits`; the answers are kept for the process. `bits` has the ranks of a group agree on an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from ascend_parallel.ops.problem import Problem

log = logging.getLogger("ascend_parallel")

# Memory layout of the right operand [K, N]: a transposed weight [N, K] (forward), a row-major weight (backward), or
# either (empty). A layer derives the layout from the pass, so that all ranks name the same.
TRANSPOSED, ROW_MAJOR, ANY = "transposed", "row_major", ""

# Number of distinct rows in an operand; a larger operand repeats them.
DRAWN_ROWS = 509


Pieces = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Pieces of a product, each with the same elements of the whole one."""


class CutProduct(Hashable, Protocol):
    """A product in pieces.

    problem
        The whole product, [m, k] x [k, n].
    launches
        As of `Backend`: the host then reads one answer, not one for each piece.
    """

    @property
    def problem(self) -> Problem: ...  # noqa: D102

    @property
    def launches(self) -> bool: ...  # noqa: D102

    def pieces(self, x: torch.Tensor, w: torch.Tensor) -> Pieces:
        """Multiply x [m, k] and w [k, n] whole and in pieces."""


def first_with_same_bits(
    cuts: Sequence[CutProduct], layouts: Sequence[str], device: torch.device, start: int = 0
) -> int:
    """Return the index, from `start` on, of the first cut that keeps the bits in all layouts, or ``len(cuts)``."""
    threads = torch.get_num_threads()
    keep = (all(same_bits(cut, layout, device, threads) for layout in layouts) for cut in cuts[start:])
    return next((index for index, same in enumerate(keep, start) if same), len(cuts))


@lru_cache(maxsize=4096)
def same_bits(cut: CutProduct, layout: str, device: torch.device, threads: int) -> bool:
    """Tell whether the product in pieces has the bits of the whole one on this machine, with `threads` threads."""
    try:
        with without_grad_and_modes():
            x, w = cancelling_operands(cut.problem, layout, device)
            pieces = cut.pieces(x, w)
            if not cut.launches:
                return all(torch.equal(piece, expected) for piece, expected in pieces)
            return bool(torch.stack([(piece == expected).all() for piece, expected in pieces]).all())
    except torch.OutOfMemoryError:
        return False


def log_time(what: str, begin: float) -> None:
    """Log, on rank 0, how long it took to ask about products, in words, since `begin` (`time.perf_counter`)."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("%s: asked in %.0f ms which chunks keep the bits", what, 1e3 * (time.perf_counter() - begin))


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


def modes_are_on(inference: bool) -> bool:
    """Tell whether `without_grad_and_modes` has more to switch off, or on, than autograd and functions of torch's."""
    return bool(
        torch.is_inference_mode_enabled() != inference
        or torch._C._len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        or any(map(torch.is_autocast_enabled, _autocast_devices()))
    )


def in_inference_mode(inference: bool) -> AbstractContextManager[object]:
    """Return a context that is in inference mode, or is not; to leave the mode turns autograd on."""
    return nullcontext() if torch.is_inference_mode_enabled() == inference else torch.inference_mode(inference)


@cache
def _autocast_devices() -> tuple[str, ...]:
    """Return the devices of this machine; autocast of an absent one fails: torch_npu may be there without an NPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
