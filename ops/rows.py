"""How the rows of a matmul are cut into chunks."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

# Every cut lies on a multiple of this many rows: shorter or odd chunks were seen to change a matmul's bits in
# every dtype (docs/decisions/0003-bits.md), and cost more than they hide.
ROW_TILE = 16

# Rows of a tile of the deterministic mode: few of them slow a matmul down, many leave nothing to cut.
LARGEST_TILE = 256
TILES = 16  # at least so many, where that leaves them ROW_TILE rows
MOST_TILES = 64  # at most so many, where they would have more than LARGEST_TILE rows

# No chunk has more than this many times the rows of the first and last one.
STEEPEST = 2

Sizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def split_rows(rows: int, num_chunks: int, tile: int = ROW_TILE) -> Sizes:
    """Cut `rows` rows into at most `num_chunks` chunks and return the rows of each, in order.

    Every cut is a multiple of `tile`; the tail is folded into the last chunk; rows too few to be
    cut stay whole. The first and the last chunk are half as long as the others (weights 1, 2, 2, 2, 2,
    2, 2, 1 for 8). What cannot overlap is the first chunk's matmul when communication is the longer
    part and the last chunk's collective when the matmul is, so both ends are short; where the two are
    about equal, equal chunks would be a little better (docs/overlap.md has the formula).
    """
    tiles = rows // tile
    count = max(1, min(num_chunks, tiles))
    weights = [min(i + 1, count - i, STEEPEST) for i in range(count)]
    total = sum(weights)
    cuts = [0]
    for i in range(1, count):
        ideal = (tiles * sum(weights[:i]) + total // 2) // total
        cuts.append(min(max(ideal, cuts[-1] + 1), tiles - (count - i)))
    edges = [cut * tile for cut in cuts] + [rows]
    return tuple(stop - start for start, stop in pairwise(edges))


def deterministic_tile(m: int) -> int:
    """Return the rows of a tile in which the deterministic mode multiplies, for a matmul of `m` rows on all ranks.

    A power of two that depends on m alone: neither on the chunks nor on the ranks nor on the kernel.
    """
    fine, coarse = _power_of_two(m // TILES), _power_of_two(m // MOST_TILES)
    return max(ROW_TILE, min(fine, LARGEST_TILE), coarse)


def snap(sizes: Sizes, tile: int) -> Sizes:
    """Move every cut to the nearest multiple of `tile` rows; chunks that become empty are dropped."""
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
