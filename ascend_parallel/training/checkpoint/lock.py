"""One save of a step at a time in a folder, whichever jobs share it.

The lock is a file that only one process can create (``O_EXCL``, which network file systems have too, unlike locks of
the system). It says who holds it, and how often its holder has beaten since. A holder of this host is dead when its
process is; one of another host when its beat stands still, watched for `STILL` seconds by this process's own clock.

Taking the lock of a job that lives after all, stopped for longer, mixes nothing: each save has a directory of its own,
and only one can be given the step's name.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ascend_parallel.training.checkpoint.differences import CheckpointError

BEAT, STILL, LEFT = 2.0, 20.0, 600.0  # seconds
LOOK = 0.25
_DEAD = ("Z", "X")


@dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    token
        Of the save, part of its directory's name.
    place
        What processes see each other: a host's name, its start, a namespace of processes.
    pid, started
        The process, and when it started in ticks of the host's clock: pids are used again.
    """

    token: str
    host: str
    place: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        """Whether this process can see whether the owner lives."""
        return self.place == _place() != "" and self.started >= 0

    @property
    def has_ended(self) -> bool:
        """Whether the owner, which is here, is dead."""
        return _started(self.pid) != self.started


class StepLock:
    """The lock of one step, taken and given back by the process that leads a save."""

    def __init__(self, path: Path, token: str) -> None:
        """Prepare; `token` names the save."""
        self.path, self._token = path, token
        self._file: int | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, also a dead job's; raise `CheckpointError` naming the holder if that lives.

        Waits for the beat of a holder on another host, at most `STILL` seconds.
        """
        while not self._create():
            told = read(self.path)
            if told is not None and not lives(self.path, told):
                take_away(self.path, told, self._token)
            elif told is not None and (now := read(self.path)) is not None:  # it may have said who it is meanwhile
                owner = owner_of(now)
                who = "a process that does not say which" if owner is None else f"process {owner.pid} of {owner.host}"
                raise CheckpointError(
                    f"{self.path.with_suffix('')} is being saved by another job, {who}: save to another folder, or wait"
                )
        self._thread = threading.Thread(target=self._beat, name=f"lock of {self.path.stem}", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back if it is held; a second call does nothing."""
        if self._file is None:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self._file)
        self._file = None
        told = read(self.path)
        owner = owner_of(told) if told is not None else None
        if owner is not None and owner.token == self._token:
            self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        try:
            self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        pid = os.getpid()
        started = _started(pid)
        owner = Owner(self._token, socket.gethostname(), _place(), pid, -1 if started is None else started)
        os.write(self._file, json.dumps(asdict(owner)).encode() + b"\n")
        os.fsync(self._file)
        return True

    def _beat(self) -> None:
        """Add a byte now and then: a file that grows is seen by hosts that remember its times."""
        while not self._over.wait(BEAT):
            assert self._file is not None
            with suppress(OSError):  # a full or absent disk: the save itself says so
                os.write(self._file, b".")
                os.fsync(self._file)


def read(path: Path) -> str | None:
    """Return what a lock says, or None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def owner_of(told: str) -> Owner | None:
    """Return who holds a lock, by what it says; None where it says nothing yet."""
    try:
        return Owner(**json.loads(told.partition("\n")[0]))
    except (ValueError, TypeError):
        return None


def lives(path: Path, told: str) -> bool:
    """Tell whether the holder of a lock, which said `told`, lives; watches it if nothing else tells."""
    owner = owner_of(told)
    if owner is not None and owner.is_here:
        return not owner.has_ended
    end = time.monotonic() + STILL
    while time.monotonic() < end:
        time.sleep(LOOK)
        now = read(path)
        if now is None:
            return False
        if now != told:
            return True
    return False


def is_left(path: Path, told: str, now: Path) -> bool:
    """Tell, without waiting, whether a lock is a dead job's: of this host, or `LEFT` seconds older than file `now`."""
    owner = owner_of(told)
    if owner is not None and owner.is_here:
        return owner.has_ended
    try:  # by the file system's clock, which is the same for both
        return now.stat().st_mtime - path.stat().st_mtime > LEFT
    except FileNotFoundError:
        return False


def take_away(path: Path, told: str, token: str) -> None:
    """Remove a dead holder's lock, unless another one has taken its place meanwhile."""
    away = path.with_name(f"{path.name}.{token}")
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(away)
        if read(away) != told:
            with suppress(OSError):
                os.link(away, path)
        away.unlink()


def _place() -> str:
    """Return what is alike for processes that see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return when a process started; None if there is none, or it is a dead one that nobody has waited for."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        state, *rest = told.rpartition(")")[2].split()
        return None if state in _DEAD else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None
