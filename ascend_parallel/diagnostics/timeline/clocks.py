"""Measure the clock differences between the ranks of a group, through the group's store.

CLOCK_MONOTONIC counts from the boot of a host, so ranks of two hosts have different zeros. Each rank asks the group's
first rank for its time, ROUNDS times. The fastest answer counts, and half of its round trip is the largest possible
error of the difference.
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
    """A rank of a group does not take part in the clock comparison; the message names the rank."""


@dataclass(frozen=True)
class Difference:
    """The offset from this rank's clock to that of rank `to`, and its largest error; both in ns."""

    to: int
    offset: int
    error: int


def compare(group: dist.ProcessGroup) -> Difference | None:
    """Return this rank's clock difference to the first rank of `group`; None for the backend "fake".

    Every rank of the group must call this function. Raises `ClockError` on the waiting ranks after the store's timeout.
    """
    if dist.get_backend(group) == "fake":
        return None
    store: Any = c10d._get_process_group_store(group)
    ranks = dist.get_process_group_ranks(group)
    first, mine = ranks[0], dist.get_rank()
    # Each rank counts its comparisons, so that two comparisons have different keys.
    prefix = f"ascend_parallel/clocks/{store.add(f'ascend_parallel/clocks/count/{mine}', 1)}"
    if mine != first:
        return _ask(store, prefix, mine, first, group)
    for rank in ranks[1:]:
        for number in range(ROUNDS):
            _wait(store, f"{prefix}/{rank}/{number}/asked", rank, group)
            store.set(f"{prefix}/{rank}/{number}/answer", str(time.monotonic_ns()))
    return Difference(first, 0, 0)


def _ask(store: Any, prefix: str, mine: int, first: int, group: dist.ProcessGroup) -> Difference:
    answers = []
    for number in range(ROUNDS):
        key = f"{prefix}/{mine}/{number}"
        before = time.monotonic_ns()
        store.set(f"{key}/asked", "")
        _wait(store, f"{key}/answer", first, group)
        after = time.monotonic_ns()
        answers.append(((after - before + 1) // 2, int(store.get(f"{key}/answer")) - (before + after) // 2))
    error, offset = min(answers)
    return Difference(first, offset, error)


def _wait(store: Any, key: str, rank: int, group: dist.ProcessGroup) -> None:
    limit: timedelta = store.timeout
    try:
        store.wait([key], limit)
    except RuntimeError as error:  # DistStoreError is a RuntimeError; a FileStore raises RuntimeError
        raise ClockError(
            f"timeline: rank {rank} of {describe(group)} did not compare its clock within {limit.total_seconds():g} s: "
            "it has stopped, or does not record (record on every rank, or export COC_TIMELINE on every rank); "
            f"{first_line(error)}"
        ) from error


def boot_id() -> str:
    """Return the host's boot id, which is unique for each boot; empty where the system has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
