"""The compute units of devices, and whether a matmul fills them: a smaller one takes as long as one that does.

Data, by type of device: ranks decide alike, whichever card each has. Of a type it is the chip of most units; sources
are in ascend_parallel/tuning/cost_model/data/hardware. On a CPU a core computes a matmul of any size.
"""

from __future__ import annotations

from typing import NamedTuple

from ascend_parallel.ops.problem import ALL_GATHER, REDUCE_SCATTER, Problem
from ascend_parallel.ops.rows import Sizes, is_one_gather


class Units(NamedTuple):
    """Units that each compute a tile [rows, columns] of a product at a time."""

    number: int
    rows: int
    columns: int


UNITS = {
    "cuda": Units(132, 128, 128),  # H100: its multiprocessors (h100-nvlink.toml); cuBLAS has tiles of this size
    "npu": Units(32, 128, 256),  # Ascend 950: its cubes (ascend-950.toml), and the blocks of Huawei's planner
}
# Of the units; powers of two, as models have, fill 128 of 132.
LEAST_SHARE = 0.9


def fills(problem: Problem, sizes: Sizes) -> bool:
    """Tell whether the matmul of each chunk has tiles for the units: of the rows of all ranks that it multiplies."""
    units, whole = UNITS.get(problem.device), len(sizes) == 1 or is_one_gather(sizes)
    if units is None or whole or problem.is_exchange or problem.antiquant:
        return True
    ranks = {ALL_GATHER: problem.ranks - 1, REDUCE_SCATTER: problem.ranks}.get(problem.operator, 1)
    tiles = ranks * -(-min(sizes) // units.rows) * -(-problem.n // units.columns)
    return tiles >= LEAST_SHARE * units.number
