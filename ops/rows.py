"""How the rows of a matmul are cut into chunks."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

# A matmul cut between rows gives the bits of the whole only if every cut is a multiple of the
# row tile of the kernels beneath; 16 holds for every dtype tried (docs/decisions/0003-bits.md).
ROW_TILE = 16

# No chunk has more than this many times the rows of the first and last one.
STEEPEST = 2

Sizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def split_rows(rows: int, num_chunks: int) -> Sizes:
    """Cut `rows` rows into at most `num_chunks` chunks and return the rows of each, in order.

    Every cut is a multiple of `ROW_TILE`; the tail is folded into the last chunk; rows too few to be
    cut stay whole. The first and the last chunk are half as long as the others (weights 1, 2, 2, 2, 2,
    2, 2, 1 for 8). What cannot overlap is the first chunk's matmul when communication is the longer
    part and the last chunk's collective when the matmul is, so both ends are short; where the two are
    about equal, equal chunks would be a little better (docs/overlap.md has the formula).
    """
    tiles = rows // ROW_TILE
    count = max(1, min(num_chunks, tiles))
    weights = [min(i + 1, count - i, STEEPEST) for i in range(count)]
    total = sum(weights)
    cuts = [0]
    for i in range(1, count):
        ideal = (tiles * sum(weights[:i]) + total // 2) // total
        cuts.append(min(max(ideal, cuts[-1] + 1), tiles - (count - i)))
    edges = [cut * ROW_TILE for cut in cuts] + [rows]
    return tuple(stop - start for start, stop in pairwise(edges))
