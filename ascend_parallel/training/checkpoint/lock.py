"""A lock file that allows only one save of a step at a time in a folder, whichever jobs share the folder.

Only one process can create the file (``O_EXCL``, which network file systems support, unlike system locks). The file
names its holder and gets a heartbeat byte from time to time. A holder on this host is dead when its process has ended.
A holder on another host is dead when the file does not grow for `STILL` seconds by this process's own clock.

Taking the lock of a live job that was stopped for longer mixes nothing: each save has a directory of its own, and only
one directory can be renamed to the step's name.
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
    """The process that holds a lock.

    token
        The save's token, part of its directory's name.
    place
        Processes with the same place see each other's pids: host name, boot id, pid namespace.
    pid, started
        The process, and its start in ticks of the host's clock, since pids are reused.
    """

    token: str
    host: str
    place: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        """Whether this process can see the owner's process."""
        return self.place == _place() != "" and self.started >= 0

    @property
    def has_ended(self) -> bool:
        """Whether the owner, which must be here, is dead."""
        return _started(self.pid) != self.started


class StepLock:
    """The lock of one step, held by the process that leads a save."""

    def __init__(self, path: Path, token: str) -> None:
        """Prepare the lock of `path` for the save `token`."""
        self.path, self._token = path, token
        self._file: int | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, also from a dead job; raise `CheckpointError` naming the holder if the holder is alive.

        Waits for a heartbeat of a holder on another host, at most `STILL` seconds.
        """
        while not self._create():
            text = read(self.path)
            if text is not None and not lives(self.path, text):
                take_away(self.path, text, self._token)
            elif text is not None and (latest := read(self.path)) is not None:  # the holder may have written its name
                owner = owner_of(latest)
                who = "a process that does not say which" if owner is None else f"process {owner.pid} of {owner.host}"
                raise CheckpointError(
                    f"{self.path.with_suffix('')} is being saved by another job, {who}: save to another folder, or wait"
                )
        self._thread = threading.Thread(target=self._beat, name=f"lock of {self.path.stem}", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lock if it is held; a second call does nothing."""
        if self._file is None:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        os.close(self._file)
        self._file = None
        text = read(self.path)
        owner = owner_of(text) if text is not None else None
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
        """Append a byte every `BEAT` seconds: other hosts see the file grow even if they cache its times."""
        while not self._over.wait(BEAT):
            assert self._file is not None
            with suppress(OSError):  # for a full or absent disk the save itself raises
                os.write(self._file, b".")
                os.fsync(self._file)


def read(path: Path) -> str | None:
    """Return a lock file's text, or None if there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def owner_of(text: str) -> Owner | None:
    """Return the holder that a lock file's text names; None if it names none yet."""
    try:
        return Owner(**json.loads(text.partition("\n")[0]))
    except (ValueError, TypeError):
        return None


def lives(path: Path, text: str) -> bool:
    """Tell whether the holder of a lock file with `text` is alive; watch the file if nothing else tells."""
    owner = owner_of(text)
    if owner is not None and owner.is_here:
        return not owner.has_ended
    end = time.monotonic() + STILL
    while time.monotonic() < end:
        time.sleep(LOOK)
        latest = read(path)
        if latest is None:
            return False
        if latest != text:
            return True
    return False


def is_left(path: Path, text: str, own: Path) -> bool:
    """Tell, without waiting, whether a lock is a dead job's: of this host, or `LEFT` seconds older than file `own`."""
    owner = owner_of(text)
    if owner is not None and owner.is_here:
        return owner.has_ended
    try:  # by the file system's clock, which is the same for both files
        return own.stat().st_mtime - path.stat().st_mtime > LEFT
    except FileNotFoundError:
        return False


def take_away(path: Path, text: str, token: str) -> None:
    """Remove a dead holder's lock, unless another process has replaced the lock meanwhile."""
    away = path.with_name(f"{path.name}.{token}")
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(away)
        if read(away) != text:
            with suppress(OSError):
                os.link(away, path)
        away.unlink()


def _place() -> str:
    """Return a string that is equal for processes that see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if the process does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        state, *rest = text.rpartition(")")[2].split()
        return None if state in _DEAD else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None
