"""How far the clocks of a group's ranks are apart, found out through the group's store.

CLOCK_MONOTONIC counts from the start of a host, so ranks of two hosts share no zero. Each rank asks the
group's first rank for its time, again and again. The answer that came back fastest counts, and half of
the time it took is the largest error the difference can have.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.pending import first_line
from ascend_parallel.process_groups import describe

ROUNDS = 10


class ClockError(RuntimeError):
    """A rank of a group does not take part in comparing clocks; the message names it."""


@dataclass(frozen=True)
class Difference:
    """What to add to this rank's times to have those of rank `to`, and the largest error of that; both in ns."""

    to: int
    offset: int
    error: int


def compare(group: dist.ProcessGroup) -> Difference | None:
    """Compare the clocks of `group`, on all its ranks alike; None where its ranks do not exist (backend "fake").

    Raises `ClockError` when the store's time limit has passed, on the ranks that waited.
    """
    if dist.get_backend(group) == "fake":
        return None
    store: Any = c10d._get_process_group_store(group)
    ranks = dist.get_process_group_ranks(group)
    first, mine = ranks[0], dist.get_rank()
    # Each rank counts its comparisons, so that no key of an earlier one is met again.
    prefix = f"ascend_parallel/clocks/{store.add(f'ascend_parallel/clocks/count/{mine}', 1)}"
    if mine != first:
        return _ask(store, prefix, mine, first, group)
    for rank in ranks[1:]:
        for number in range(ROUNDS):
            _wait(store, f"{prefix}/{rank}/{number}/asked", rank, group)
            store.set(f"{prefix}/{rank}/{number}/answer", str(time.monotonic_ns()))
    return Difference(first, 0, 0)


def _ask(store: Any, prefix: str, mine: int, first: int, group: dist.ProcessGroup) -> Difference:
    found = []
    for number in range(ROUNDS):
        key = f"{prefix}/{mine}/{number}"
        before = time.monotonic_ns()
        store.set(f"{key}/asked", "")
        _wait(store, f"{key}/answer", first, group)
        after = time.monotonic_ns()
        found.append(((after - before + 1) // 2, int(store.get(f"{key}/answer")) - (before + after) // 2))
    error, offset = min(found)
    return Difference(first, offset, error)


def _wait(store: Any, key: str, rank: int, group: dist.ProcessGroup) -> None:
    limit: timedelta = store.timeout
    try:
        store.wait([key], limit)
    except RuntimeError as error:  # a DistStoreError, but of a store in a file
        raise ClockError(
            f"timeline: rank {rank} of {describe(group)} did not compare its clock within {limit.total_seconds():g} s: "
            "it has stopped, or does not record (record on every rank alike, and export COC_TIMELINE on each); "
            f"{first_line(error)}"
        ) from error


def boot_id() -> str:
    """Return what tells one start of a host from all others, or an empty text where the system does not say."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
