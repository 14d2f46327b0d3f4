"""Run a command, and end it with all that it has started: a program of its own, of the standard library alone.

    python -I -S reaper.py PIPE PARENT PATIENCE FOLDER COMMAND ...

It ends them when the command ends, when PIPE is closed (`process_tree` closes it, and the kernel when the program that
asked ends, however it ends), and on SIGTERM, SIGINT or SIGHUP. Processes that leave their parent or their session come
back to a *subreaper* (man 2 prctl), so none is lost: torchrun's ranks have sessions of their own, and ignore SIGTERM
at times. First SIGTERM, then, PATIENCE seconds later, SIGKILL; at once if that is 0. The exit status is the command's.
If the program that asked is gone, its FOLDER is removed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
# A process that waits for a device cannot be killed before the device answers.
KILL_LIMIT = 10.0
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOT_STARTED = 127


def main() -> int:
    """Run the command of the arguments, and return its exit status: below 0 for a signal."""
    pipe, parent, patience, folder, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken = _signals()
    try:
        started = subprocess.Popen(command, start_new_session=True)  # kept: it would wait for its process when it goes
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return NOT_STARTED
    child, statuses = started.pid, _ended()
    while child not in statuses:
        ready, _, _ = select.select([int(pipe), woken], [], [])
        if int(pipe) in ready or any(number in ENDS for number in os.read(woken, 1024)):
            break
        statuses |= _ended()
    statuses |= _end_all(float(patience))
    if folder and os.getppid() != int(parent):
        shutil.rmtree(folder, ignore_errors=True)
    return statuses.get(child, -signal.SIGKILL)


def _signals() -> int:
    """Return a file in which each signal is a byte; those that are ignored, as under nohup, stay so."""
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    for number in (signal.SIGCHLD, *ENDS):
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # a function, which a command does not inherit, as it would SIG_IGN
    return woken


def _end_all(patience: float) -> dict[int, int]:
    """End all descendants; return the exit statuses of those that were this process's children."""
    statuses = _ended()
    told: set[int] = set()
    began = time.monotonic()
    while left := set(_descendants()):
        passed = time.monotonic() - began
        if passed >= patience + KILL_LIMIT:
            sys.stderr.write(f"processes that SIGKILL does not end: {', '.join(map(str, sorted(left)))}\n")
            break
        if passed >= patience:
            _send(signal.SIGKILL, left)
        else:
            _send(signal.SIGTERM, left - told)
            told |= left
        time.sleep(POLL_SECONDS)
        statuses |= _ended()
    return statuses | _ended()


def _send(number: signal.Signals, processes: set[int]) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except (ProcessLookupError, PermissionError):  # it has ended, or is another user's (sudo)
            continue


def _ended() -> dict[int, int]:
    """Return the exit statuses of children that have ended since the last call, by process."""
    statuses: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if not process:
            return statuses
        statuses[process] = os.waitstatus_to_exitcode(status)


def _descendants() -> Iterator[int]:
    """Yield the living processes below this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            state, parent = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(path.name))
    below = [os.getpid()]
    for process in below:
        below += children.get(process, ())
    yield from below[1:]


def _leave(status: int) -> None:
    """End with an exit status, or, for one below 0, by the signal that ended the command."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    _leave(main())
