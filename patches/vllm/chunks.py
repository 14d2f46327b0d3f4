"""The chunks of a number of tokens: a pure function of the tokens, the wanted count, the device and the least rows.

The number of tokens changes with every step of a server. So the sizes come from a short ladder, of which the start asks
from which step on the model's matmuls keep their bits (patches/vllm/bits.py). Every chunk has a size of the ladder, but
for the last one, which takes what is left, and has no fewer rows than that step.
"""

from __future__ import annotations

from functools import lru_cache

from ascend_parallel.devices import DEVICES, device_type
from ascend_parallel.ops.rows import Sizes

# Below it no step is cut on any device: a constant, since each layer of each decoded token asks.
LEAST_TOKENS = 2 * min(row.chunk_rows[0] for row in DEVICES.values())


@lru_cache(maxsize=64)
def ladder_of(device: str, least: int = 0) -> Sizes:
    """Return the allowed rows of a chunk on devices of this type, of at least `least`, a step of the ladder."""
    return tuple(step for step in device_type(device).chunk_rows if step >= least)


@lru_cache(maxsize=16384)
def token_chunks(tokens: int, count: int, device: str, least: int = 0) -> Sizes:
    """Return the rows of each chunk: `count` chunks or a few more; a single one below twice the least rows.

    The size is the largest of the ladder of which there are `count`. A rest of less than half of it, or of fewer rows
    than the least step, joins the last.
    """
    ladder = ladder_of(device, least)
    if count < 2 or tokens < 2 * ladder[0]:
        return (tokens,)
    size = max((step for step in ladder if step * count <= tokens), default=ladder[0])
    whole, rest = divmod(tokens, size)
    if rest >= max(ladder[0], size / 2):
        return (*(size for _ in range(whole)), rest)
    return (*(size for _ in range(whole - 1)), size + rest)
