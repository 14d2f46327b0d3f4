"""The probe of bits on this machine: whether a product in pieces has the bits of the whole product.

Its operands show in which order a routine adds, and its work is no part of the user's call. Every caller asks
`first_with_same_bits`; the answers are kept for the process. `bits` has the ranks of a group agree on an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.without_modes import without_grad_and_modes

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

    matmul
        The whole product, [m, k] x [k, n].
    launches
        As of `Backend`: the host then reads one answer, not one for each piece.
    """

    @property
    def matmul(self) -> Matmul: ...  # noqa: D102

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
            x, w = cancelling_operands(cut.matmul, layout, device)
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


def cancelling_operands(matmul: Matmul, layout: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [M, K] and w [K, N] of a matmul, w in a layout, whose product is 0 but for rounding; always the same.

    Each number of x stands twice in its row, and the two products have unlike signs, at places that are drawn. So the
    sum that a routine returns is the rounding of its own order of additions. Of random operands the same numbers
    would hide it: a sum of K products in fp32, rounded to 16 bits, is mostly the same in any order.
    """
    # On the device: a copy from the host may wait for a collective in flight, which waits for ranks that probe too.
    generator = torch.Generator(device).manual_seed(0)
    m, k, n = matmul.m, matmul.k, matmul.n
    places = torch.randperm(k, generator=generator, device=device)
    # Of as many bits as the dtype has: a product of shorter numbers is exact, and hides whether it was rounded.
    drawn_as = torch.float64 if matmul.dtype == torch.float64 else torch.float32

    def drawn(rows: int, sign: int) -> torch.Tensor:
        shape = max(1, min(rows, DRAWN_ROWS)), k // 2
        numbers = torch.randn(shape, generator=generator, device=device, dtype=drawn_as).to(matmul.dtype)
        left_over = numbers.new_zeros(shape[0], k % 2)
        base = torch.cat([numbers, sign * numbers, left_over], 1).index_select(1, places)
        return base.repeat(-(-rows // shape[0]), 1)[:rows].contiguous()

    x, w_t = drawn(m, 1), drawn(n, -1)
    return x, w_t.t() if layout == TRANSPOSED else w_t.t().contiguous()
