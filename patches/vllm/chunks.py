"""The chunks of a number of tokens: a pure function of the tokens, the wanted count and the device.

The number of tokens changes with every step of a server. So the sizes come from a short ladder: a kernel meets few
shapes, each of which is probed once, at the start. Every chunk has a size of the ladder, but for the last one, which
takes what is left.
"""

from __future__ import annotations

from functools import lru_cache

from ascend_parallel.ops.rows import Sizes

# Rows of a chunk. On accelerators a smaller matmul costs more than its collective hides.
LADDERS = {"cpu": (128, 256, 512, 1024, 2048)}
ACCELERATOR = (512, 1024, 2048, 4096)


def ladder_of(device: str) -> Sizes:
    """Return the allowed rows of a chunk on devices of this type."""
    return LADDERS.get(device, ACCELERATOR)


def least_tokens(device: str) -> int:
    """Return the number of tokens below which a call stays whole."""
    return 2 * ladder_of(device)[0]


@lru_cache(maxsize=16384)
def token_chunks(tokens: int, count: int, device: str) -> Sizes:
    """Return the rows of each chunk: `count` chunks or a few more, a single one below `least_tokens`.

    The size is the largest of the ladder of which there are `count`. A rest of less than half of it joins the last.
    """
    if count < 2 or tokens < least_tokens(device):
        return (tokens,)
    ladder = ladder_of(device)
    size = max((step for step in ladder if step * count <= tokens), default=ladder[0])
    whole, rest = divmod(tokens, size)
    if 2 * rest >= size:
        return (*(size for _ in range(whole)), rest)
    return (*(size for _ in range(whole - 1)), size + rest)
