"""Detect lost ranks: every rank sends heartbeats to the job's store; a failing rank names the ranks that stopped.

When a rank dies, a collective fails with a connection error, on another rank with a time-out, and under torchrun with
SIGTERM from the agent. None of these names the dead rank; missing heartbeats do. The first rank that finds a dead rank
reports it in the store. Every rank then writes the message at once, even if its main thread still waits, and no rank
leaves before all have written it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.process_groups.rendezvous import store_key

# Missed heartbeats that are tolerated: a busy processor delays a thread, too.
PATIENCE = 16
LOST = store_key("lost")


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
    return store_key("beat", rank)


def _announced(rank: int) -> str:
    return store_key("said", rank)


log = logging.getLogger("ascend_parallel")

INTERVAL = 0.25
# Seconds that the main thread gets to print its error after SIGTERM.
LAST_WORDS = 2.0


class RankLostError(RuntimeError):
    """Ranks of the job have stopped; the message names them and the step."""


class RankWatch:
    """Sends this rank's heartbeats in a thread of its own, and watches the others'."""

    def __init__(self, interval: float = INTERVAL) -> None:
        """Send a heartbeat every `interval` seconds until `stop` or the process ends. Needs the default group."""
        self._rank, self._ranks, self._interval = dist.get_rank(), dist.get_world_size(), interval
        _warn_of_restarts(self._rank)
        group = dist.group.WORLD
        assert group is not None
        store: Any = c10d._get_process_group_store(group)
        self._mine, self._theirs = (Heartbeats(store, self._rank, self._ranks, interval) for _ in range(2))
        self._ended, self._writing, self._failing = threading.Event(), threading.Lock(), threading.Event()
        self._known_lost: dict[int, int] = {}  # the ranks known to have stopped, with their heartbeat counts
        self.step = 0
        self._thread = threading.Thread(target=self._send, name="ascend_parallel beat", daemon=True)
        self._thread.start()
        self._handler_before, self._wakeup_socket = _on_sigterm(self._terminated)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the heartbeats; the others will find this rank gone."""
        if not self._ended.is_set():
            atexit.unregister(self.stop)
            self._ended.set()
            self._thread.join(LAST_WORDS)  # it waits without limit for a store whose host stands still
            self._wakeup_socket.close()
            if threading.current_thread() is threading.main_thread() and self._handler_before is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, self._handler_before)

    @contextmanager
    def name_lost_ranks(self, step: int) -> Iterator[None]:
        """Turn a `RuntimeError` inside into a `RankLostError` if ranks have stopped; else raise it unchanged."""
        self.step = step
        try:
            yield
        except RuntimeError as error:
            self._failing.set()
            if lost := self._lost():
                raise RankLostError(self._text(lost)) from error
            self._failing.clear()
            raise

    def _lost(self) -> dict[int, int]:
        """Return the ranks without heartbeats, {} if there are none; write them, and wait for the others to do so."""
        try:
            lost = self._theirs.unchanged(self._known_lost) or self._theirs.stopped()
        except RuntimeError:  # dist.DistNetworkError: the store's host has ended
            lost = self._known_lost or ({0: 0} if self._rank else {})
        if lost:
            self._announce(self._theirs, lost)
            with suppress(RuntimeError):
                self._theirs.wait_for_others(lost)
        return lost

    def _send(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._mine.beat()
                lost = self._mine.reported()
            except RuntimeError:  # the store has ended; this rank's own collectives will fail
                return
            if lost:
                self._announce(self._mine, lost)

    def _announce(self, heartbeats: Heartbeats, lost: dict[int, int]) -> None:
        """Write the lost ranks, once, and tell the other ranks that they were written."""
        with self._writing:
            if lost.keys() != self._known_lost.keys():
                _write(self._text(lost))
            self._known_lost = lost
        with suppress(RuntimeError):
            heartbeats.announced()

    def _text(self, lost: dict[int, int]) -> str:
        ranks = ", ".join(map(str, sorted(lost)))
        return f"rank {ranks} stopped in step {self.step} of the training (reported by rank {self._rank})"

    def _terminated(self) -> None:
        """Write the lost ranks and end the process, whatever the main thread waits for."""
        if not self._lost():
            _write(f"rank {self._rank} was terminated in step {self.step}")
        if self._failing.is_set():
            threading.main_thread().join(LAST_WORDS)
        os._exit(128 + signal.SIGTERM)


def _write(text: str) -> None:
    """Write to file descriptor 2: torch's hook for uncaught errors replaces sys.stderr while it prints one."""
    os.write(2, f"ascend_parallel: {text}\n".encode())


def _warn_of_restarts(rank: int) -> None:
    """Warn if torchrun cannot restart: in its own store gloo finds the addresses of the ended processes.

    https://github.com/pytorch/pytorch/issues/135712
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if rank == 0 and restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        log.warning(
            "torchrun --max-restarts: restarted processes will not connect to each other. Export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"
        )


def _on_sigterm(call: Any) -> tuple[Any, socket.socket]:
    """Run `call` in a thread on SIGTERM unless a handler is set; return the default handler, or None.

    A main thread that waits in a collective runs no Python handler; a thread that reads the wake-up socket does.
    """
    reader, writer = socket.socketpair()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        reader.close()
        return None, writer
    writer.setblocking(False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if previous_fd != -1:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGTERM, before)
        reader.close()
        return None, writer

    def wait() -> None:
        while signals := reader.recv(64):
            if signal.SIGTERM in signals:
                call()
        reader.close()

    threading.Thread(target=wait, name="ascend_parallel SIGTERM", daemon=True).start()
    return before, writer
