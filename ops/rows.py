"""Cut the rows of a matmul into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm

# Every cut is at a multiple of this many rows. Shorter or odd chunks changed a matmul's bits in every dtype
# (docs/decisions/0003-bits.md), and cost more time than they hide.
ROW_TILE = 16

# Rows of a tile of the deterministic mode. Small tiles slow a matmul down; large tiles allow few chunks.
LARGEST_TILE = 256
TILES = 16  # at least this many tiles, if each then has ROW_TILE rows or more
MOST_TILES = 64  # at most this many tiles, if each would otherwise have more than LARGEST_TILE rows

# No chunk has more than this many times the rows of the first and the last chunk.
STEEPEST = 2

# On a device every cut is at a multiple of this many rows, if each chunk then has as many: a routine computes tiles of
# 64 to 256 rows, and multiples of the largest leave none half empty.
DEVICE_TILE = 256
# Where ranks share few rows: the largest of these at which each chunk has one. Of 512 rows in 4 chunks each has 128; in
# 80, 176, 176 and 80 rows, a multiple of 16 alone, a third of the tiles of 128 would be empty.
DEVICE_TILES = (DEVICE_TILE, 128, 64)

Sizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def stops_of(sizes: Sizes) -> Sizes:
    """Return the row behind each chunk."""
    return tuple(accumulate(sizes))


@lru_cache(maxsize=4096)
def split_rows(rows: int, num_chunks: int, tile: int = ROW_TILE) -> Sizes:
    """Cut `rows` rows into at most `num_chunks` chunks and return the rows of each, in order.

    Every cut is a multiple of `tile`; the last chunk takes the remainder; too few rows stay whole. The first and the
    last chunk are half as long as the others (weights 1, 2, 2, 2, 2, 2, 2, 1 for 8 chunks). If communication takes
    longer, the first chunk's matmul cannot overlap; if the matmul takes longer, the last chunk's collective cannot:
    so both are short. If both take about the same time, equal chunks would be a little better (docs/overlap.md has
    the formula).
    """
    tiles = rows // tile
    count = max(1, min(num_chunks, tiles))
    weights = [min(i + 1, count - i, STEEPEST) for i in range(count)]
    return _by_weight(rows, weights, tile)


@lru_cache(maxsize=4096)
def even_rows(rows: int, num_chunks: int, tile: int = ROW_TILE) -> Sizes:
    """Cut `rows` rows into at most `num_chunks` equal chunks, at multiples of one of `DEVICE_TILES` and of `tile` rows.

    For a device: small matmuls leave multiprocessors idle, and change their bits more often. Too few rows are cut as by
    `split_rows`.
    """
    step = _device_step(rows, num_chunks, tile)
    if not step:
        return split_rows(rows, num_chunks, tile)
    tiles = rows // step
    cuts = [step * (tiles * index // num_chunks) for index in range(num_chunks)]
    return tuple(stop - start for start, stop in pairwise([*cuts, rows]))


@lru_cache(maxsize=4096)
def uneven_rows(rows: int, num_chunks: int, tile: int = ROW_TILE, *, short_first: bool) -> Sizes:
    """Cut as `even_rows`, with the first or the last chunk half as long as the others.

    What a pass cannot hide is the gather before its first matmul, or the reduction after its last: that chunk is short.
    """
    step = _device_step(rows, num_chunks, tile)
    if not step:
        return split_rows(rows, num_chunks, tile)
    weights = [2] * num_chunks
    weights[0 if short_first else -1] = 1
    return _by_weight(rows, weights, step)


def _device_step(rows: int, num_chunks: int, tile: int) -> int:
    """Return the largest step of `DEVICE_TILES`, a multiple of `tile` too, of which each chunk has one; 0: none."""
    return next((step for step in (lcm(size, tile) for size in DEVICE_TILES) if rows // step >= num_chunks), 0)


def one_gather(rows: int) -> Sizes:
    """Return the sizes of an all-gather that is not cut, and runs under the product of a rank's own rows.

    Its first chunk is empty: a single size is a gather that is waited for before the whole product.
    """
    return (0, rows)


def is_one_gather(sizes: Sizes) -> bool:
    """Tell whether the sizes are those of `one_gather`."""
    return len(sizes) == 2 and not sizes[0]


def _by_weight(rows: int, weights: Sequence[int], tile: int) -> Sizes:
    """Cut `rows` rows into chunks of these weights, at multiples of `tile`; there are as many tiles as chunks."""
    tiles, count, total = rows // tile, len(weights), sum(weights)
    cuts = [0]
    for i in range(1, count):
        ideal = (tiles * sum(weights[:i]) + total // 2) // total
        cuts.append(min(max(ideal, cuts[-1] + 1), tiles - (count - i)))
    edges = [cut * tile for cut in cuts] + [rows]
    return tuple(stop - start for start, stop in pairwise(edges))


def deterministic_tile(m: int) -> int:
    """Return the number of rows in a tile of the deterministic mode, for a matmul of `m` rows on all ranks.

    A power of two that depends only on m, not on the chunks, the ranks or the kernel.
    """
    fine, coarse = _power_of_two(m // TILES), _power_of_two(m // MOST_TILES)
    return max(ROW_TILE, min(fine, LARGEST_TILE), coarse)


def snap(sizes: Sizes, tile: int) -> Sizes:
    """Return the sizes with every cut moved to the nearest multiple of `tile` rows, without empty chunks."""
    rows, cuts, at = sum(sizes), [0], 0
    for size in sizes[:-1]:
        at += size
        cut = (at + tile // 2) // tile * tile
        if cuts[-1] < cut < rows:
            cuts.append(cut)
    return tuple(stop - start for start, stop in pairwise([*cuts, rows]))


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`, or 0."""
    return 1 << number.bit_length() >> 1
