"""What ranks leave in the job's store so that the others know of them: heartbeats, who has stopped, and that it was said."""

from __future__ import annotations

import json
import time
from typing import Any

# Heartbeats that may be missed: a busy processor delays a thread, too.
PATIENCE = 16
LOST = "ascend_parallel/lost"


class Heartbeats:
    """One rank's view of a store, over a connection of its own: one waits while another is used.

    Everything raises `RuntimeError` (`torch.distributed.DistNetworkError`) once the store has ended with its host.
    """

    def __init__(self, store: Any, rank: int, ranks: int, interval: float) -> None:
        """Look at the heartbeats of `ranks` ranks, one every `interval` seconds, as `rank`."""
        self._store, self._rank, self._interval = store.clone(), rank, interval
        self._others = [other for other in range(ranks) if other != rank]

    def beat(self) -> None:
        """Leave one beat of this rank."""
        self._store.add(_beat(self._rank), 1)

    def still(self, lost: dict[int, int]) -> dict[int, int]:
        """Return those of `lost`, heartbeats by rank, that have left none since."""
        return {rank: count for rank, count in lost.items() if self._count(rank) == count}

    def heard(self) -> dict[int, int]:
        """Return the ranks that some rank found stopped, with their heartbeats; {} if none has, or if they beat again."""
        if not self._store.check([LOST]):
            return {}
        told = {int(rank): count for rank, count in json.loads(self._store.get(LOST)).items()}
        told.pop(self._rank, None)
        return self.still(told)

    def stopped(self) -> dict[int, int]:
        """Return the ranks that do not beat, with the heartbeats they left, and let the others know; takes a few intervals.

        Sooner if another rank has found some.
        """
        if heard := self.heard():
            return heard
        time.sleep(self._interval)  # the last beat of one that has just died may still be on its way
        silent = {rank: self._count(rank) for rank in self._others}
        end = time.monotonic() + PATIENCE * self._interval
        while silent and time.monotonic() < end:
            time.sleep(self._interval / 2)
            if heard := self.heard():
                return heard
            silent = self.still(silent)
        if silent:
            self._store.set(LOST, json.dumps(silent))
        return silent

    def said(self) -> None:
        """Let the others know that this rank has said who is lost."""
        self._store.set(_said(self._rank), "1")

    def stay(self, lost: dict[int, int]) -> None:
        """Wait until all ranks but `lost` have said so, at most as long as a rank may miss heartbeats.

        A launcher ends all ranks as soon as one has ended, and the store ends with its host.
        """
        keys = [_said(rank) for rank in self._others if rank not in lost]
        end = time.monotonic() + PATIENCE * self._interval
        while keys and time.monotonic() < end and not self._store.check(keys):
            time.sleep(self._interval / 2)

    def _count(self, rank: int) -> int:
        return int(self._store.add(_beat(rank), 0))


def _beat(rank: int) -> str:
    return f"ascend_parallel/beat/{rank}"


def _said(rank: int) -> str:
    return f"ascend_parallel/said/{rank}"
