"""Which ranks are still there: every rank heartbeats in the job's store, and one that ends names those that have stopped.

A collective whose peer has died ends with an error of a connection, on another rank with a time-out, and under torchrun
with SIGTERM from the agent. None of these says who died. The heartbeats do. The first rank that finds out lets the others
know, each says so at once, also one whose main thread still waits, and none leaves before all have.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.training.heartbeats import Heartbeats

log = logging.getLogger("ascend_parallel")

INTERVAL = 0.25
# Seconds for the main thread to print its error where SIGTERM has come, too.
LAST_WORDS = 2.0


class RankLostError(RuntimeError):
    """Ranks of the job have stopped; the message names them and the step."""


class RankWatch:
    """Heartbeats for this rank in a thread of its own, and looks at the others' heartbeats."""

    def __init__(self, interval: float = INTERVAL) -> None:
        """Start to beat, every `interval` seconds, until `stop` or the process ends. Needs the default group."""
        self._rank, self._ranks, self._interval = dist.get_rank(), dist.get_world_size(), interval
        _warn_of_restarts(self._rank)
        group = dist.group.WORLD
        assert group is not None
        store: Any = c10d._get_process_group_store(group)
        self._mine, self._theirs = (Heartbeats(store, self._rank, self._ranks, interval) for _ in range(2))
        self._ended, self._saying, self._failing = threading.Event(), threading.Lock(), threading.Event()
        self._found: dict[int, int] = {}  # the ranks that are known to have stopped, with the heartbeats they left
        self.step = 0
        self._thread = threading.Thread(target=self._beat, name="ascend_parallel beat", daemon=True)
        self._thread.start()
        self._before, self._told = _when_terminated(self._terminated)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Beat no more; the others will find this rank gone."""
        if not self._ended.is_set():
            atexit.unregister(self.stop)
            self._ended.set()
            self._thread.join()
            self._told.close()
            if threading.current_thread() is threading.main_thread() and self._before is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def naming(self, step: int) -> Iterator[None]:
        """Turn an error of the step inside into a `RankLostError` if ranks have stopped; else it goes on as it is."""
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
        """Return the ranks that do not beat, {} if all do, and say so; leave time for the other ranks to do so, too."""
        try:
            lost = self._theirs.still(self._found) or self._theirs.stopped()
        except RuntimeError:  # dist.DistNetworkError: whoever held the store has ended
            lost = self._found or ({0: 0} if self._rank else {})
        if lost:
            self._say(self._theirs, lost)
            with suppress(RuntimeError):
                self._theirs.stay(lost)
        return lost

    def _beat(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._mine.beat()
                lost = self._mine.heard()
            except RuntimeError:  # the store has ended; this rank's own collectives will say so
                return
            if lost:
                self._say(self._mine, lost)

    def _say(self, heartbeats: Heartbeats, lost: dict[int, int]) -> None:
        """Write who has stopped, once, and let the other ranks know that it was written."""
        with self._saying:
            if lost.keys() != self._found.keys():
                _write(self._text(lost))
            self._found = lost
        with suppress(RuntimeError):
            heartbeats.said()

    def _text(self, lost: dict[int, int]) -> str:
        which = ", ".join(map(str, sorted(lost)))
        return f"rank {which} stopped in step {self.step} of the training (told on rank {self._rank})"

    def _terminated(self) -> None:
        """Say who is gone and end, whatever the main thread waits for."""
        if not self._lost():
            _write(f"rank {self._rank} was terminated in step {self.step}")
        if self._failing.is_set():
            threading.main_thread().join(LAST_WORDS)
        os._exit(128 + signal.SIGTERM)


def _write(text: str) -> None:
    """Write past sys.stderr, which torch's hook for uncaught errors replaces while it prints one."""
    os.write(2, f"ascend_parallel: {text}\n".encode())


def _warn_of_restarts(rank: int) -> None:
    """Say what torchrun needs to restart: in its own store gloo finds the ended processes' addresses.

    https://github.com/pytorch/pytorch/issues/135712
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if rank == 0 and restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        log.warning(
            "torchrun --max-restarts: restarted processes will not connect to each other. Export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"
        )


def _when_terminated(call: Any) -> tuple[Any, socket.socket]:
    """Have `call` run in a thread on SIGTERM, if nobody else handles it; return the handler before, or None.

    A main thread that waits in a collective runs no handler of Python's; a thread that reads the wake-up socket does.
    """
    reader, writer = socket.socketpair()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        reader.close()
        return None, writer
    writer.setblocking(False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    other = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        signal.signal(signal.SIGTERM, before)
        reader.close()
        return None, writer

    def wait() -> None:
        while found := reader.recv(64):
            if signal.SIGTERM in found:
                call()
        reader.close()

    threading.Thread(target=wait, name="ascend_parallel SIGTERM", daemon=True).start()
    return before, writer
