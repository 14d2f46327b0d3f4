"""The matmuls of the kernels: whole, in tiles of rows, or in blocks of each rank's rows.

With a `row_tile`, every block is multiplied in tiles of `row_tile` rows, one call each, from its first row on. A cut
at a multiple of the tile changes no call, so the bits of the result do not depend on the chunks, whatever routine
the library picks for a shape. The bits must not depend on addresses either: MKL picks other routines for rows that
do not begin at multiples of 16 bytes (seen on an AMD EPYC, fp32, N of 1, 10 and 11). Operands that do not begin at a
multiple of `ALIGNMENT` are therefore copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from ascend_parallel.ops.record import Steps
from ascend_parallel.ops.rows import Sizes

ALIGNMENT = 64  # bytes, a power of two; the alignment of torch's own allocations

# Bytes of a line and of a block of Ascend's memory.
LINE_BYTES = 512
BLOCK_BYTES = 32


class BlockedWeight(Protocol):
    """A weight [K, N] that is multiplied in blocks of its own (ops/blocks.py)."""

    shape: torch.Size

    def multiply(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Write ``x_m @ w`` to y_m: x_m [m, K], y_m [m, N]."""


class MultipliedRows:
    """Stands for the weight [N, N] of rows [m, N] that have been multiplied: their product is a copy of them.

    An operator then runs its collectives alone, in the number and order that the matmul's shape has.
    """

    def __init__(self, columns: int) -> None:
        """Stand for a weight of `columns` columns."""
        self.shape = torch.Size((columns, columns))

    def multiply(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Copy the rows x_m [m, N] to y_m."""
        y_m.copy_(x_m)


class NoProduct:
    """A weight whose product nobody needs: an operator that is given it runs its collectives alone."""

    def __init__(self, shape: torch.Size) -> None:
        """Stand for a weight [K, N]."""
        self.shape = shape

    def multiply(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Leave y_m as it is."""


Blocks = Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
"""For each chunk the blocks of rows that are multiplied, [m, K] or [r, m, K], and their places in the product."""

# Weights without a matmul: a call runs its collectives alone.
ALONE = (MultipliedRows, NoProduct)


def multiply(x_m: torch.Tensor, w: torch.Tensor | BlockedWeight, y_m: torch.Tensor, row_tile: int = 0) -> None:
    """Write ``x_m @ w`` to y_m: x_m [m, K], w [K, N], y_m [m, N]; in tiles of `row_tile` rows unless that is 0."""
    multiply_blocks((x_m,), w, (y_m,), row_tile)


def multiply_aligned(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor) -> None:
    """Write ``x_m @ w`` to y_m in one call, of operands that begin at a multiple of `ALIGNMENT` bytes."""
    w = aligned(w)
    if _is_aligned(y_m):
        torch.mm(aligned(x_m), w, out=y_m)
    else:
        y_m.copy_(torch.mm(aligned(x_m), w))


def aligned(operand: torch.Tensor) -> torch.Tensor:
    """Return the operand, or on a CPU a copy if its memory does not begin at a multiple of `ALIGNMENT`."""
    return operand if _is_aligned(operand) else operand.clone()


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0


def product(x_m: torch.Tensor, w: torch.Tensor | BlockedWeight, row_tile: int = 0, ranks: int = 1) -> torch.Tensor:
    """Return ``x_m @ w`` [M, N]; unless `row_tile` is 0, in tiles of that many rows within each rank's M / R rows."""
    if not row_tile and isinstance(w, torch.Tensor):
        return torch.mm(x_m, w)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    rows = max(1, x_m.shape[0] // ranks)
    for x_block, y_block in zip(_cut(x_m, rows), _cut(y_m, rows), strict=True):
        multiply(x_block, w, y_block, row_tile)
    return y_m


def multiply_blocks(
    x_blocks: Sequence[torch.Tensor],
    w: torch.Tensor | BlockedWeight,
    y_blocks: Sequence[torch.Tensor],
    row_tile: int = 0,
) -> None:
    """Write ``x_block @ w`` to each y_block, as `chunk_products` says."""
    (calls,) = chunk_products([(x_blocks, y_blocks)], w, row_tile)
    for call in calls:
        call()


def chunk_products(chunks: Blocks, w: torch.Tensor | BlockedWeight, row_tile: int = 0) -> list[Steps]:
    """Return for each chunk the calls that write ``x_block @ w`` to the places of its blocks, w [K, N].

    Of batches of rows w may be expanded, [r, K, N]. The rows themselves may come later, before the calls.
    """
    found: list[Steps] = []
    for x_blocks, y_blocks in chunks:
        calls: list[Callable[[], object]] = []
        for x_block, y_block in zip(x_blocks, y_blocks, strict=True):
            if not isinstance(w, torch.Tensor):
                calls.append(functools.partial(w.multiply, x_block, y_block, row_tile))
            elif x_block.dim() == 3:
                w_r = w if w.dim() == 3 else w.expand(x_block.shape[0], *w.shape)
                calls.append(functools.partial(torch.bmm, x_block, w_r, out=y_block))
            elif 0 < row_tile < x_block.shape[0]:
                calls.append(functools.partial(_multiply_tiles, x_block, w, y_block, row_tile))
            elif not w.is_cpu or not (x_block.data_ptr() | w.data_ptr() | y_block.data_ptr()) % ALIGNMENT:
                calls.append(functools.partial(torch.mm, x_block, w, out=y_block))
            else:
                calls.append(functools.partial(multiply_aligned, x_block, w, y_block))
        found.append(calls)
    return found


def _multiply_tiles(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
    w = aligned(w)
    for x_tile, y_tile in zip(_cut(x_m, row_tile), _cut(y_m, row_tile), strict=True):
        multiply_aligned(x_tile, w, y_tile)


def rank_blocks(x_r_m: torch.Tensor, batched: bool, but: int | None = None) -> Sequence[torch.Tensor]:
    """Return the ranks' rows [R, m, K], without those of rank `but`, in the blocks that are multiplied fastest.

    A block [m, K] for each rank; `batched` (`Backend.launches`, without tiles), one launch for several ranks.
    """
    if not batched:
        return [x_m for rank, x_m in enumerate(x_r_m.unbind()) if rank != but]
    return batches(x_r_m, but)


def batches(x_r_m: torch.Tensor, but: int | None = None) -> Sequence[torch.Tensor]:
    """Return the ranks' rows [R, m, K], without those of rank `but`, in one launch each: [m, K] or batches [r, m, K].

    Between the first and the last rank there are two: no stride leads over a rank's own rows.
    """
    ranks = x_r_m.shape[0]
    if but is None:
        return [x_r_m]
    bounds = ((0, but), (but + 1, ranks))
    return [x_r_m[start] if stop - start == 1 else x_r_m[start:stop] for start, stop in bounds if start < stop]


def cut_blocks(blocks: Sequence[torch.Tensor], sizes: Sizes) -> Iterable[tuple[torch.Tensor, ...]]:
    """Cut the rows of every block [..., m, K] into chunks; item i of the result holds the i-th chunk of each block."""
    return zip(*[torch.split_with_sizes(block, sizes, -2) for block in blocks], strict=True)


def _cut(x_m: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = torch.split(x_m, rows)
    return parts


# What `align_operands` does to operands: pads K, or lays w out by its columns. Empty: nothing.
PAD, COLUMNS = "pad", "columns"


def alignment_of(k: int, n: int, chunk_rows: int, size: int, k_min: int, k_max: int) -> str:
    """Return how the operands x [M, K] and w [K, N] are aligned: `PAD`, `COLUMNS`, or empty, not at all.

    Ascend's matmul units read rows of 512 bytes fastest; an element has `size` bytes, a chunk `chunk_rows` rows.

    1. K is a multiple of 512 bytes. If `chunk_rows` or N is none, the numbers of a column of w shall lie together in
       memory, as those of a weight [N, K] do.
    2. K is no multiple of 32 bytes, ``k_min <= K <= k_max``, and `chunk_rows` and N are multiples of 512 bytes: K is
       padded with zeros to the next 512 bytes.
    3. Otherwise: nothing.

    Only the chunked kernel on an NPU aligns. On a CPU alignment would cost copies and change the bits. Source of the
    rule and of its window: MindSpeed, ``matmul_soc_friendly`` with ``k_min`` and ``k_max``.
    """
    line, whole_lines = LINE_BYTES // size, (chunk_rows * size) % LINE_BYTES == 0 and (n * size) % LINE_BYTES == 0
    if k % line == 0:
        return "" if whole_lines else COLUMNS
    return PAD if whole_lines and k_min <= k <= k_max and k % (BLOCK_BYTES // size) else ""


def is_laid_out(w: torch.Tensor, alignment: str) -> bool:
    """Tell whether `align_operands` has nothing to do for w [K, N]."""
    return not alignment or (alignment == COLUMNS and w.stride(0) == 1)


def align_operands(x_m: torch.Tensor, w: torch.Tensor, alignment: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x ``[M, K']`` and w ``[K', N]``, K' >= K, with the product of x ``[M, K]`` and w ``[K, N]``."""
    if is_laid_out(w, alignment):
        return x_m, w
    if alignment == COLUMNS:
        return x_m, w.t().contiguous().t()
    padding = -w.shape[0] % (LINE_BYTES // x_m.element_size())
    return F.pad(x_m, (0, padding)), F.pad(w.t(), (0, padding)).t()
