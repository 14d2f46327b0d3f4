"""Starts the ranks of a script, as torchrun does, and ends all when one fails."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(script: Sequence[str], ranks: int, variables: dict[str, str], patience: float = 10.0) -> int:
    """Run a Python script on so many ranks; return the first exit status that is not 0.

    When a rank fails the others have `patience` seconds to say what they miss, then they are ended.
    """
    # The ranks have sessions of their own: they end with this process.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *script],
            env={**variables, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    try:
        return first_failure(processes, patience)
    finally:
        end(processes)
        signal.signal(signal.SIGTERM, before)


def first_failure(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> int:
    """Wait for all; after a failure only for `patience` seconds more. Return the status of the first that failed."""
    failed, limit = 0, float("inf")
    while None in (statuses := [process.poll() for process in processes]) and time.monotonic() < limit:
        if not failed and any(statuses):
            failed, limit = next(filter(None, statuses)), time.monotonic() + patience
        time.sleep(0.05)
    return failed or next(filter(None, statuses), 0)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, with all that it started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
