"""Products whose elements do not know each other, for COC_DETERMINISTIC=invariant.

An element of ``x @ w`` has the bits that torch.mm gives it in a *tile*: `ROWS` rows of x, all of K, `COLUMNS` columns
of w. How many rows or columns a call has, how the weight lies in memory, and where a row stands do not change them. So
a token has the same bits in a batch of any size, in prefill and in decoding, on any number of ranks.

No library documents this. Every product is therefore asked of the machine before its first call (`tiling_of`): whether
rows and columns have the same bits at every place of a tile, which is an error otherwise (float64 with MKL on an AMD
EPYC), and which larger calls give the bits of the tiles; these are made in their place. 16-bit operands are multiplied
in fp32, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.multiply import multiply_aligned
from ascend_parallel.ops.without_modes import without_grad_and_modes

ROWS, COLUMNS = 16, 64
# Rows of the calls that stand for several tiles, or for one of few rows, where they have their bits.
LARGER, SMALLER = (256, 64), (8, 4)
# Columns of a 16-bit weight that are converted at once: a weight has no second, wide copy.
CONVERTED = 2048
# By how many places the columns of a tile are moved when the machine is asked.
MOVED = (1, 5, 16, 33)


@dataclass(frozen=True)
class Tiling:
    """The calls that give the bits of the tiles.

    rows
        The rows of a call, the largest first.
    whole
        Whether a call multiplies all columns of the weight, as they lie in memory; otherwise copies of `COLUMNS`.
    """

    rows: tuple[int, ...]
    whole: bool


def multiply_tiles(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor) -> None:
    """Write ``x_m @ w`` to y_m, each element with the bits of its tile: contiguous x_m [m, K], w [K, N], y_m [m, N].

    x_m and w may have 16 bits: they are multiplied in fp32. y_m may have 16 bits, or the dtype of the product.
    """
    wide = torch.promote_types(x_m.dtype, torch.float32)
    x_wide = x_m.to(wide)
    columns = max(1, w.shape[1]) if w.dtype == wide else CONVERTED
    for w_c, y_c in zip(torch.split(w, columns, 1), torch.split(y_m, columns, 1), strict=True):
        if y_c.dtype == wide and y_c.is_contiguous():
            _multiply(x_wide, w_c, y_c)
            continue
        y_wide = torch.empty_like(y_c, dtype=wide, memory_format=torch.contiguous_format)
        _multiply(x_wide, w_c.to(wide), y_wide)
        y_c.copy_(y_wide)


def multiply_batches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return ``x @ w`` [B, M, N], each element with the bits of its tile: x [B, M, K], w [B, K, N], of one wide dtype.

    M is a multiple of `ROWS`, or one of `SMALLER`.
    """
    if in_one_call(tuple(x.shape), tuple(w.shape), x.stride(), w.stride(), x.dtype, x.device, torch.get_num_threads()):
        return torch.bmm(x, w)
    y = x.new_empty(x.shape[0], x.shape[1], w.shape[2])
    for x_m, w_b, y_m in zip(x, w, y, strict=True):
        multiply_tiles(x_m.contiguous(), w_b, y_m)
    return y


def _multiply(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor) -> None:
    if not x_m.numel() or not w.numel():
        y_m.zero_()
        return
    tiling = tiling_of(w)
    if tiling.whole:
        _multiply_rows(x_m, w, y_m, tiling.rows)
        return
    for w_c, y_c in zip(torch.split(w, COLUMNS, 1), torch.split(y_m, COLUMNS, 1), strict=True):
        y_tile = x_m.new_empty(x_m.shape[0], COLUMNS)
        _multiply_rows(x_m, _tile_of_columns(w_c), y_tile, tiling.rows)
        y_c.copy_(y_tile[:, : y_c.shape[1]])


def _multiply_rows(x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor, sizes: tuple[int, ...]) -> None:
    start, m = 0, x_m.shape[0]
    for rows in sizes:
        if rows < ROWS:
            break
        for stop in range(start + rows, m + 1, rows):
            multiply_aligned(x_m[start:stop], w, y_m[start:stop])
            start = stop
    if start < m:
        filled = min(rows for rows in sizes if rows >= m - start)
        x_tile = x_m.new_zeros(filled, x_m.shape[1])
        x_tile[: m - start] = x_m[start:]
        y_tile = x_m.new_empty(filled, w.shape[1])
        multiply_aligned(x_tile, w, y_tile)
        y_m[start:].copy_(y_tile[: m - start])


def _tile_of_columns(w: torch.Tensor) -> torch.Tensor:
    """Return up to `COLUMNS` columns of w [K, n] as those of a tile: transposed, zeros at the end."""
    tile = w.new_zeros(COLUMNS, w.shape[0])
    tile[: w.shape[1]] = w.t()
    return tile.t()


def tiling_of(w: torch.Tensor) -> Tiling:
    """Return the calls that multiply a weight w [K, N] of fp32 or float64, as it lies in memory.

    Raises `DegreeError` if a row or a column has other bits at another place of a tile on this machine.
    """
    strides = (w.stride(0), w.stride(1))
    return asked_tiling(w.shape[0], w.shape[1], strides, w.dtype, w.device, torch.get_num_threads())


@lru_cache(maxsize=4096)
def asked_tiling(
    k: int, n: int, strides: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int
) -> Tiling:
    """Ask the machine for the calls that multiply a weight [K, N] with these strides; as `tiling_of`."""
    with without_grad_and_modes():
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(ROWS, k, generator=generator, device=device, dtype=dtype)
        w = torch.empty_strided((k, n), strides, dtype=dtype, device=device)
        w.copy_(torch.randn(k, n, generator=generator, device=device, dtype=dtype))
        tiles = [_tile_of_columns(w_c) for w_c in torch.split(w, COLUMNS, 1)]
        if not _same_at_every_place(x, tiles[0]):
            raise DegreeError(
                f"a product of {ROWS} rows, [{ROWS}, {k}] x [{k}, {n}] in {dtype} on {device.type} with {threads} "
                "threads, gives a row or a column other bits at another place among them"
            )
        y = torch.cat([torch.mm(x, tile) for tile in tiles], 1)[:, :n]
        for operand, expected, whole in ((w, y, True), (tiles[0], torch.mm(x, tiles[0]), False)):
            if whole and not torch.equal(_product(x, operand), expected):
                continue
            larger = (rows for rows in LARGER if _same_in_more_rows(x, operand, expected, rows))
            smaller = (rows for rows in SMALLER if _same_in_fewer_rows(x, operand, expected, rows))
            return Tiling((*larger, ROWS, *smaller), whole)
    raise AssertionError("the tile has its own bits")


def _same_at_every_place(x: torch.Tensor, tile: torch.Tensor) -> bool:
    """Tell whether the elements of ``x @ tile`` have the same bits wherever their row and their column stand."""
    y = torch.mm(x, tile)
    by_rows = (torch.equal(torch.mm(x.roll(by, 0), tile), y.roll(by, 0)) for by in range(1, ROWS))
    columns = tile.t()  # rows in memory
    by_columns = (torch.equal(torch.mm(x, columns.roll(by, 0).t()), y.roll(by, 1)) for by in MOVED)
    alone = (torch.equal(torch.mm(_only(x, row), tile)[row], y[row]) for row in (0, ROWS - 1))
    return all(by_rows) and all(by_columns) and all(alone)


def _only(x: torch.Tensor, row: int) -> torch.Tensor:
    alone = torch.zeros_like(x)
    alone[row] = x[row]
    return alone


def _same_in_more_rows(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: int) -> bool:
    """Tell whether a call of `rows` rows, those of x in other orders, gives them the bits of y."""
    order = torch.cat([torch.arange(ROWS, device=x.device).roll(by) for by in range(rows // ROWS)])
    return torch.equal(_product(x[order], w), y[order])


def _same_in_fewer_rows(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: int) -> bool:
    """Tell whether calls of `rows` rows of x, wherever they stand and beside zeros, give them the bits of y."""
    parts = zip(torch.split(x, rows), torch.split(y, rows), strict=True)
    moved = ((x_c.roll(by, 0), y_c.roll(by, 0)) for x_c, y_c in parts for by in range(rows))
    alone = _product(_only(x[:rows], rows - 1), w)[rows - 1]
    return torch.equal(alone, y[rows - 1]) and all(torch.equal(_product(x_c, w), y_c) for x_c, y_c in moved)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape[0], w.shape[1])
    multiply_aligned(x, w, y)
    return y


@lru_cache(maxsize=1 << 16)
def in_one_call(
    of_x: tuple[int, ...],
    of_w: tuple[int, ...],
    x_strides: tuple[int, ...],
    w_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> bool:
    """Tell whether one batched product of operands with these shapes and strides has the bits of the tiles."""
    batches, rows, k = of_x
    with without_grad_and_modes():
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randn(batches, ROWS, k, generator=generator, device=device, dtype=dtype)
        x = torch.empty_strided(of_x, x_strides, dtype=dtype, device=device)
        w = torch.empty_strided(of_w, w_strides, dtype=dtype, device=device)
        w.copy_(torch.randn(of_w, generator=generator, device=device, dtype=dtype))
        expected = []
        for x_m, w_b in zip(drawn, w, strict=True):
            tiling_of(w_b)  # refuses a product without tiles
            tiles = [torch.mm(x_m, _tile_of_columns(w_c)) for w_c in torch.split(w_b, COLUMNS, 1)]
            expected.append(torch.cat(tiles, 1)[:, : of_w[2]])
        y = torch.stack(expected)
        return all(torch.equal(torch.bmm(x.copy_(drawn[:, order]), w), y[:, order]) for order in _orders(rows, device))


def _orders(rows: int, device: torch.device) -> list[torch.Tensor]:
    """Return which rows of a tile the calls of `rows` rows have: in one call all, each at as many places as there are.

    Calls of fewer rows than a tile's have each row at each of their places.
    """
    places = torch.arange(ROWS, device=device)
    if rows >= ROWS:
        return [torch.cat([places.roll(by) for by in range(rows // ROWS)])]
    return [part.roll(by) for part in torch.split(places, rows) for by in range(rows)]
