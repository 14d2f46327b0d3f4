"""The matmuls that kernels are made of: rows whole, in tiles, or as blocks of the ranks' rows.

With a `row_tile` every block of rows is multiplied in tiles of so many rows, one call each, from its first
row on. A cut that lies on a multiple of the tile then leaves every call as it was: the bits of the result
cannot depend on the chunks, whatever routine the library takes for a shape. Nor may they depend on where a call's
operands lie: MKL takes other routines for rows that do not begin at multiples of 16 bytes (seen on an AMD EPYC, fp32,
N of 1, 10 and 11), so each call's operands begin at multiples of `ALIGNMENT`, in copies where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ascend_parallel.ops.rows import Sizes

ALIGNMENT = 64  # bytes; torch's own allocations begin so


def multiply(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor, row_tile: int = 0) -> None:
    """Write ``[m, K] x [K, N]`` to y_m [m, N]; with `row_tile` in tiles of so many rows."""
    w = aligned(w)
    if not 0 < row_tile < x_m.shape[0]:
        _multiply(x_m, w, y_m)
        return
    for x_tile, y_tile in zip(_cut(x_m, row_tile), _cut(y_m, row_tile), strict=True):
        _multiply(x_tile, w, y_tile)


def _multiply(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor) -> None:
    if _is_aligned(y_m):
        torch.mm(aligned(x_m), w, out=y_m)
    else:
        y_m.copy_(torch.mm(aligned(x_m), w))


def aligned(operand: torch.Tensor) -> torch.Tensor:
    """Return an operand whose memory begins at a multiple of `ALIGNMENT`: on a CPU, a copy if its own does not."""
    return operand if _is_aligned(operand) else operand.clone()


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0


def product(x_m: torch.Tensor, w: torch.Tensor, row_tile: int = 0, ranks: int = 1) -> torch.Tensor:
    """``[M, K] x [K, N]``: [M, N]; with `row_tile` in tiles of so many rows of each of the ranks' M / R rows."""
    if not row_tile:
        return torch.mm(x_m, w)
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    rows = max(1, x_m.shape[0] // ranks)
    for x_block, y_block in zip(_cut(x_m, rows), _cut(y_m, rows), strict=True):
        multiply(x_block, w, y_block, row_tile)
    return y_m


def multiply_blocks(
    x_blocks: Sequence[torch.Tensor], w: torch.Tensor, y_blocks: Sequence[torch.Tensor], row_tile: int = 0
) -> None:
    """Multiply blocks of rows ``[m, K]``, or batches of them ``[r, m, K]``, by w ``[K, N]`` into their places."""
    for x_block, y_block in zip(x_blocks, y_blocks, strict=True):
        if x_block.dim() == 2:
            multiply(x_block, w, y_block, row_tile)
        else:
            torch.bmm(x_block, w.expand(x_block.shape[0], *w.shape), out=y_block)


def rank_blocks(x_r_m: torch.Tensor, row_tile: int = 0, but: int | None = None) -> Sequence[torch.Tensor]:
    """Rows of the ranks ``[R, m, K]``, without those of rank `but`, as the device multiplies them best.

    On a CPU, and in tiles, each rank's ``[m, K]``: there is no launch to save, and batches in 16 bits are slower.
    """
    if row_tile or x_r_m.device.type == "cpu":
        return [x_m for rank, x_m in enumerate(x_r_m.unbind()) if rank != but]
    return batches(x_r_m, but)


def batches(x_r_m: torch.Tensor, but: int | None = None) -> Sequence[torch.Tensor]:
    """Rows of the ranks ``[R, m, K]``, without those of rank `but`, as strided ``[r, m, K]``, one launch each."""
    found = [x_r_m] if but is None else [x_r_m[:but], x_r_m[but + 1 :]]
    return [batch for batch in found if batch.shape[0]]


def cut_blocks(blocks: Sequence[torch.Tensor], sizes: Sizes) -> Iterable[tuple[torch.Tensor, ...]]:
    """Cut the rows of every block ``[..., m, K]``: item i holds the i-th chunk of each."""
    return zip(*(torch.split_with_sizes(block, sizes, -2) for block in blocks), strict=True)


def _cut(x_m: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = torch.split(x_m, rows)
    return parts
