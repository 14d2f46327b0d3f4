"""Search the chunk sizes of least cost: equal sizes of every count first, then unequal sizes.

The search is a pure function of the costs: ranks with the same numbers find the same sizes. Sizes are counted in tiles
of rows, usually 16; the rows beyond the last whole tile belong to the last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ascend_parallel.ops.rows import ROW_TILE, Sizes, split_rows

# The largest count that is tried, and how many of the best seeds are refined.
MOST_CHUNKS = 16
REFINED = 6
# Ratios between neighbouring chunks of the seeds; above 1 the first chunk is the shortest, below 1 the last.
GROWTHS = (0.4, 0.55, 0.7, 0.85, 1.2, 1.45, 1.8, 2.5)
# Gains below this share are numerical noise.
LEAST_GAIN = 1e-9

Tiles = tuple[int, ...]
Cost = Callable[[Sizes], float]


@dataclass(frozen=True, kw_only=True)
class ChunkSearchResult:
    """The result of a search: seconds of one chunk, and sizes and seconds of the best equal chunks and of the best."""

    one_chunk: float
    equal: Sizes
    equal_seconds: float
    sizes: Sizes
    seconds: float


def equal_sizes(rows: int, count: int, tile: int = ROW_TILE) -> Sizes:
    """Split `rows` into at most `count` chunks, as equal as tiles allow: longer chunks first, the tail in the last."""
    tiles = rows // tile
    count = max(1, min(count, tiles))
    return _sizes(tuple(tiles // count + (i < tiles % count) for i in range(count)), rows, tile)


def best_sizes(rows: int, cost: Cost, *, most_chunks: int = MOST_CHUNKS, tile: int = ROW_TILE) -> ChunkSearchResult:
    """Return the sizes of least `cost`, a function from the rows per chunk to seconds; cuts are at multiples of `tile`.

    The candidates include one chunk, equal chunks and `split_rows` of every count, so the result is never worse than
    any of these. Of equal costs, equal chunks win, and then fewer chunks.
    """
    seconds = cache(cost)
    counts = range(1, max(1, min(most_chunks, rows // tile)) + 1)
    equal = min((equal_sizes(rows, count, tile) for count in counts), key=lambda sizes: (seconds(sizes), len(sizes)))
    seeds = {equal, *(split_rows(rows, count, tile) for count in counts), *_grown(rows, counts, tile)}
    ranked = sorted(seeds, key=lambda sizes: (seconds(sizes), len(sizes), sizes))
    starts = [equal, *[sizes for sizes in ranked if len(sizes) > 1][:REFINED]]
    refined = [_refined(sizes, rows, seconds, tile) for sizes in dict.fromkeys(starts)]
    best = equal
    for sizes in sorted(refined, key=lambda sizes: (seconds(sizes), len(sizes), sizes)):
        if seconds(sizes) < seconds(best) * (1 - LEAST_GAIN):
            best = sizes
    return ChunkSearchResult(
        one_chunk=seconds((rows,)), equal=equal, equal_seconds=seconds(equal), sizes=best, seconds=seconds(best)
    )


def _refined(sizes: Sizes, rows: int, seconds: Cost, tile: int) -> Sizes:
    """Return better sizes: move tiles between two chunks, or merge neighbours, in ever smaller steps."""
    best, step = tuple(size // tile for size in sizes), max(1, rows // tile // 8)
    while step:
        better = min(_neighbours(best, step), key=lambda tiles: seconds(_sizes(tiles, rows, tile)), default=best)
        if seconds(_sizes(better, rows, tile)) < seconds(_sizes(best, rows, tile)) * (1 - LEAST_GAIN):
            best = better
        else:
            step //= 2
    return _sizes(best, rows, tile)


def _neighbours(tiles: Tiles, step: int) -> Iterable[Tiles]:
    """Yield the lists with `step` tiles moved between two chunks, or with two neighbours merged."""
    for source, have in enumerate(tiles):
        if have > step:
            for target in range(len(tiles)):
                if target != source:
                    moved = list(tiles)
                    moved[source] -= step
                    moved[target] += step
                    yield tuple(moved)
    for i in range(len(tiles) - 1):
        yield (*tiles[:i], tiles[i] + tiles[i + 1], *tiles[i + 2 :])


def _grown(rows: int, counts: Iterable[int], tile: int) -> Iterable[Sizes]:
    """Yield sizes in geometric progression: each chunk is a constant factor longer than its predecessor."""
    tiles = rows // tile
    for count in counts:
        for growth in GROWTHS if 1 < count <= tiles else ():
            weights = [growth**i for i in range(count)]
            total, done, cuts = sum(weights), 0.0, [0]
            for i, weight in enumerate(weights[:-1]):
                done += weight
                cuts.append(min(max(round(tiles * done / total), cuts[-1] + 1), tiles - (count - 1 - i)))
            edges = [*cuts, tiles]
            yield _sizes(tuple(stop - start for start, stop in pairwise(edges)), rows, tile)


def _sizes(tiles: Tiles, rows: int, tile: int) -> Sizes:
    """Return the rows of chunks of these tiles; the last chunk takes the remaining rows."""
    lengths = [tile * count for count in tiles[:-1]]
    return (*lengths, rows - sum(lengths))
