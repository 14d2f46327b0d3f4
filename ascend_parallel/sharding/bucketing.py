"""Which tensors share a bucket: their collective runs as one, for the fixed time of one.

The runtime sums gradients and gathers parameters in buckets, the optimizers send and receive in them, and the planner
prices sums of gradients by them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

FIRST_BYTES = 1 << 20
"""Size of the first bucket: it is smaller, so that communication begins early (torch/nn/parallel/distributed.py)."""


def form_buckets(items: Iterable[tuple[Hashable, int]], bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Return the indices of each bucket's items, buckets in the order of their first items; an item: (key, bytes).

    The items of a bucket have the same key. A bucket holds at most `bucket_bytes`, the first bucket of a key also at
    most `first_bytes`; a single larger item is a bucket of its own.
    """
    found: list[list[int]] = []
    last: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    for index, (key, nbytes) in enumerate(items):
        if key not in last or nbytes > room[key]:
            room[key] = bucket_bytes if key in last else min(bucket_bytes, first_bytes)
            last[key] = []
            found.append(last[key])
        last[key].append(index)
        room[key] -= nbytes
    return found
