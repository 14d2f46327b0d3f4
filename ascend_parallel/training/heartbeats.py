"""Heartbeats in the job's store: each rank's count, the ranks found stopped, and announcements of this."""

from __future__ import annotations

import json
import time
from typing import Any

# Missed heartbeats that are tolerated: a busy processor delays a thread, too.
PATIENCE = 16
LOST = "ascend_parallel/lost"


class Heartbeats:
    """A rank's view of the store, over a connection of its own, since a waiting call blocks its connection.

    Every method raises `RuntimeError` (`torch.distributed.DistNetworkError`) once the store's host has ended.
    """

    def __init__(self, store: Any, rank: int, ranks: int, interval: float) -> None:
        """Watch the heartbeats of `ranks` ranks, sent every `interval` seconds, as rank `rank`."""
        self._store, self._rank, self._interval = store.clone(), rank, interval
        self._others = [peer for peer in range(ranks) if peer != rank]

    def beat(self) -> None:
        """Increment this rank's count of heartbeats in the store."""
        self._store.add(_key(self._rank), 1)

    def unchanged(self, counts: dict[int, int]) -> dict[int, int]:
        """Return the ranks of `counts` (heartbeats by rank) that have sent no heartbeat since."""
        return {rank: count for rank, count in counts.items() if self._count(rank) == count}

    def reported(self) -> dict[int, int]:
        """Return the ranks reported stopped, with their counts; {} if none is reported, or if they beat again."""
        if not self._store.check([LOST]):
            return {}
        counts = {int(rank): count for rank, count in json.loads(self._store.get(LOST)).items()}
        counts.pop(self._rank, None)
        return self.unchanged(counts)

    def stopped(self) -> dict[int, int]:
        """Return the ranks without heartbeats, with their counts, and report them to the others.

        Takes a few intervals; less if another rank has reported some.
        """
        if reported := self.reported():
            return reported
        time.sleep(self._interval)  # the last heartbeat of a rank that has just died may still be on its way
        silent = {rank: self._count(rank) for rank in self._others}
        end = time.monotonic() + PATIENCE * self._interval
        while silent and time.monotonic() < end:
            time.sleep(self._interval / 2)
            if reported := self.reported():
                return reported
            silent = self.unchanged(silent)
        if silent:
            self._store.set(LOST, json.dumps(silent))
        return silent

    def announced(self) -> None:
        """Record in the store that this rank has written which ranks are lost."""
        self._store.set(_announced(self._rank), "1")

    def wait_for_others(self, lost: dict[int, int]) -> None:
        """Wait until all ranks but `lost` have recorded their announcement, at most `PATIENCE` intervals.

        A launcher ends all ranks as soon as any rank has ended, and the store ends with its host.
        """
        keys = [_announced(rank) for rank in self._others if rank not in lost]
        end = time.monotonic() + PATIENCE * self._interval
        while keys and time.monotonic() < end and not self._store.check(keys):
            time.sleep(self._interval / 2)

    def _count(self, rank: int) -> int:
        return int(self._store.add(_key(rank), 0))


def _key(rank: int) -> str:
    return f"ascend_parallel/beat/{rank}"


def _announced(rank: int) -> str:
    return f"ascend_parallel/said/{rank}"
