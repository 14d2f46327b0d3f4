"""Start a command with a reaper, so that nothing which it starts outlives this program, however either ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ascend_parallel.tuning.launch.reaper import KILL_LIMIT
from ascend_parallel.tuning.launch.signals import signals_as_exceptions, signals_held_back

REAPER = str(Path(__file__).with_name("reaper.py"))
STARTUP = 20.0  # seconds that a busy machine may need for the reaper's own beginning and end


@contextmanager
def process_tree(
    command: Sequence[str],
    *,
    patience: float,
    folder: str | Path = "",
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    cwd: str | Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and end it with all that it has started when the block ends, or this program does.

    patience
        Seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once.
    folder
        A temporary folder of this program's, which is removed if this program cannot do it any more (SIGKILL).

    The process has the command's exit status; that of a command that cannot be started is 127, with the reason in its
    stderr. SIGTERM and SIGHUP raise `SystemExit` in the block. The command reads nothing from this program's stdin.
    """
    reading, writing = os.pipe()
    words = [sys.executable, "-I", "-S", REAPER, str(reading), str(os.getpid()), str(patience), str(folder), *command]
    with signals_as_exceptions(), os.fdopen(reading, "rb") as ours, os.fdopen(writing, "wb") as end:
        process = subprocess.Popen(
            words,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=[reading],
        )
        try:
            ours.close()
            yield process
        finally:
            with signals_held_back():
                end.close()
                _wait(process, patience + KILL_LIMIT + STARTUP)


def _wait(process: subprocess.Popen[bytes], limit: float) -> None:
    """Wait for a reaper to end, at most `limit` seconds, and close what it wrote to."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
