"""A rendezvous of a group's ranks in the store of the group: what ranks say to each other without a collective.

Settings to compare, the name of a shared segment, a sign of life, a clock: ranks publish texts, and read those of the
others. Only this module writes keys, so that no two of them collide; a wait has a limit, and tells who did not come;
keys are deleted once nobody reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Between two looks at the store a waiting rank sleeps for an eighth of the time that it has waited, within these
# seconds. It does not wait in the store: that would keep the other threads of its process from the store.
SHORTEST_NAP, LONGEST_NAP = 0.0005, 1.0
# Seconds after which a waiting rank looks who is missing, and whether the others have given up.
LOOK = 1.0
# Seconds for which rank 0 waits until the others have read an outcome.
LEAVING = 10.0

_WRITTEN: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[tuple[int, str]]]] = WeakKeyDictionary()
"""The keys that this rank has written and not deleted, with the number of their rendezvous, by group and topic."""


def store_key(topic: str, *parts: object) -> str:
    """Return the key of a text in a store: the topic is last, so that it may contain anything."""
    return "/".join(("ascend_parallel", *map(str, parts), topic))


class Rendezvous:
    """One rendezvous of the ranks of a group on a topic.

    Each rank counts those that it came to, in the store: the count outlives a change of settings, and a new group on
    the same store never reads the texts of an earlier one. A rank's n-th rendezvous is the n-th of the others.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, *, latest: bool = False) -> None:
        """Come to the next rendezvous on `topic`; latest: return to the one that this rank came to last."""
        self.rank, self.ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        self._topic, self._written = topic, _WRITTEN.setdefault(group, {}).setdefault(topic, [])
        self._store: Any = c10d._get_process_group_store(group)
        count = store_key(topic, "number", self.rank)
        if latest:  # reading leaves nothing behind
            self._number = int(self._store.get(count)) if self._store.check([count]) else 0
        else:
            self._number = self._store.add(count, 1)

    def publish(self, name: str, text: str) -> None:
        """Publish this rank's text of a name."""
        self._store.set(self._own_key(name, self.rank), text)

    def said(self, name: str, ranks: Iterable[int]) -> dict[int, str]:
        """Return the values that ranks have published so far, by rank; does not wait."""
        keys = {rank: self._key(name, rank) for rank in ranks}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def absent(self, name: str, limit: float, given_up: Callable[[list[int], float], bool] | None = None) -> list[int]:
        """Wait until all ranks have published `name`; return those that have not within `limit` seconds.

        given_up
            ``given_up(missing, waited)`` is called about once a second; the wait ends if it returns True.
        """
        missing = list(self.ranks)
        keys = {rank: self._key(name, rank) for rank in missing}
        begin, look = time.monotonic(), 0.0
        while not self._store.check([keys[rank] for rank in missing]):
            waited = time.monotonic() - begin
            if waited >= look:
                missing = [rank for rank in missing if not self._store.check([keys[rank]])]
                if missing and (waited >= limit or (given_up is not None and given_up(missing, waited))):
                    return missing
                look = min(waited + LOOK, limit)
            nap = min(max(waited / 8, SHORTEST_NAP), LONGEST_NAP)
            time.sleep(max(min(nap, look - waited), SHORTEST_NAP))
        return []

    def texts(self, name: str) -> dict[int, str]:
        """Return the values of all ranks, by rank."""
        texts = self._store.multi_get([self._key(name, rank) for rank in self.ranks])
        return {rank: text.decode() for rank, text in zip(self.ranks, texts, strict=True)}

    def answer(self, name: str, rank: int, limit: timedelta) -> str | None:
        """Wait for the value of `rank` and return it; None: it publishes none within `limit`.

        Waits in the store, for what measures the time of an answer.
        """
        key = self._key(name, rank)
        try:
            self._store.wait([key], limit)
        except RuntimeError:  # this wait timed out, or the store is gone; then check() raises
            if not self._store.check([key]):
                return None
        text: str = self._store.get(key).decode()
        return text

    @property
    def decided(self) -> bool:
        """Whether a rank has decided the outcome."""
        return bool(self._store.check([self._key("outcome")]))

    def decide(self, outcome: str) -> str:
        """Return the outcome, the same on every rank: that of the rank which decides first."""
        decided: str = self._store.compare_set(self._own_key("outcome"), "", outcome).decode()
        return decided

    def leave(self, readers: Callable[[], int]) -> None:
        """Count this rank as one that has read the outcome; rank 0 waits until as many as `readers` returns have.

        Its process may host the store: if it ended with an error at once, the others would lose the connection instead
        of reading the reason.
        """
        read = self._own_key("read")
        with suppress(RuntimeError):  # rank 0 has waited long enough, and taken the store along
            self._store.add(read, 1)
            end = time.monotonic() + LEAVING
            while self.rank == 0 and int(self._store.get(read)) < readers() and time.monotonic() < end:
                time.sleep(0.001)

    def forget_earlier(self) -> None:
        """Delete what this rank wrote at earlier ones: nobody reads it once all ranks have come to this one."""
        for number, key in self._written:
            if number < self._number:
                self._store.delete_key(key)
        self._written[:] = [(number, key) for number, key in self._written if number >= self._number]

    def _key(self, name: str, *rank: int) -> str:
        return store_key(self._topic, self._number, name, *rank)

    def _own_key(self, name: str, *rank: int) -> str:
        """Return the key of a text that this rank writes, and note it to be deleted."""
        key = self._key(name, *rank)
        self._written.append((self._number, key))
        return key
