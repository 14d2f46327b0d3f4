"""Which ranks are still there: every rank beats in the job's store, and one that ends names those that have stopped.

A collective whose peer has died ends with an error of a connection, on another rank with a time-out, and under torchrun
with SIGTERM from the agent. None of these says who died. The beats do.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

log = logging.getLogger("ascend_parallel")

INTERVAL = 0.25
# Beats that may be missed: a busy processor delays a thread, too.
PATIENCE = 16


class RankLostError(RuntimeError):
    """Ranks of the job have stopped; the message names them and the step."""


class Watch:
    """Beats for this rank in a thread of its own, and looks at the others' beats."""

    def __init__(self, interval: float = INTERVAL) -> None:
        """Start to beat, every `interval` seconds, until `stop` or the process ends. Needs the default group."""
        self._rank, self._ranks, self._interval = dist.get_rank(), dist.get_world_size(), interval
        _warn_of_restarts(self._rank)
        group = dist.group.WORLD
        assert group is not None
        store: Any = c10d._get_process_group_store(group)
        # Connections of their own: one waits while another is used.
        self._mine, self._theirs = store.clone(), store.clone()
        self._ended = threading.Event()
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
            silent = self.silent()
            if silent:
                raise RankLostError(self._said(silent)) from error
            raise

    def silent(self) -> list[int]:
        """Return the ranks that do not beat; takes a few intervals. [] if the store itself is gone with its rank."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        time.sleep(self._interval)  # the last beat of one that has just died may still be on its way
        try:
            before = {rank: self._count(rank) for rank in others}
            end = time.monotonic() + PATIENCE * self._interval
            while others and time.monotonic() < end:
                time.sleep(self._interval / 2)
                others = [rank for rank in others if self._count(rank) == before[rank]]
        except RuntimeError:  # dist.DistNetworkError: whoever held the store has ended
            return [0] if self._rank else []
        if others and self._rank == 0:
            time.sleep(PATIENCE * self._interval)  # the store may end with this process, and the others still look
        return others

    def _count(self, rank: int) -> int:
        return int(self._theirs.add(_key(rank), 0))

    def _beat(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._mine.add(_key(self._rank), 1)
            except RuntimeError:  # the store has ended; this rank's own collectives will say so
                return

    def _said(self, silent: list[int]) -> str:
        which = ", ".join(map(str, silent))
        return f"rank {which} stopped in step {self.step} of the training (told on rank {self._rank})"

    def _terminated(self) -> None:
        """Say who is gone and end, whatever the main thread waits for."""
        silent = self.silent()
        said = self._said(silent) if silent else f"rank {self._rank} was terminated in step {self.step}"
        sys.stderr.write(f"ascend_parallel: {said}\n")
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)


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


def _key(rank: int) -> str:
    return f"ascend_parallel/beat/{rank}"


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
