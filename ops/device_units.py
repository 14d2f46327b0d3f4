"""Whether a matmul fills the compute units of a device: a smaller one takes as long as one that does.

The units are those of the chip of most units among the type of device: ranks decide alike, whichever card each has.
"""

from __future__ import annotations

from ascend_parallel.devices import device_type
from ascend_parallel.ops.call import ALL_GATHER, REDUCE_SCATTER, Matmul
from ascend_parallel.ops.rows import Sizes, is_one_gather

# Of the units; powers of two, as models have, fill 128 of 132.
LEAST_SHARE = 0.9


def fills(matmul: Matmul, sizes: Sizes) -> bool:
    """Tell whether the matmul of each chunk has tiles for the units: of the rows of all ranks that it multiplies."""
    units, whole = device_type(matmul.device).units, len(sizes) == 1 or is_one_gather(sizes)
    if units is None or whole or matmul.antiquant:
        return True
    ranks = {ALL_GATHER: matmul.ranks - 1, REDUCE_SCATTER: matmul.ranks}.get(matmul.operator, 1)
    tiles = ranks * -(-min(sizes) // units.rows) * -(-matmul.n // units.columns)
    return tiles >= LEAST_SHARE * units.number
