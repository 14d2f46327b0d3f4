"""Start one process per rank, watch all of them, and end all of them.

The last argument of a rank's program (`rank.py`) is the path of a job file, beside which are the files of its progress
and its results. `call_on_ranks` calls one function on the ranks of a group, which reports progress with `report`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_parallel.text import replace_text
from ascend_parallel.tuning.launch.devices import CPU
from ascend_parallel.tuning.launch.link import LinkEndpoint, shaped_link
from ascend_parallel.tuning.launch.process_tree import process_tree
from ascend_parallel.tuning.launch.signals import signals_as_exceptions

TAIL_CHARACTERS = 4000
POLL_SECONDS = 0.25  # long, because the ranks need the processors
PACKAGE = str(Path(__file__).parents[2])
# A rank uses the package of the program that starts it; python -m would import one of the current folder first.
PROGRAM = """import os, sys
if "" in sys.path:
    sys.path.remove("")
if (own := os.path.dirname(os.environ["PARENT_PACKAGE"])) not in sys.path:
    sys.path.insert(0, own)
from ascend_parallel.tuning.launch.rank import main
sys.path.append("")
main()
"""
# A user sets the first two for training; the ranks here call each layer directly and must not patch Megatron. torchrun
# sets the last, and the ranks here would look for torchrun's store instead of their own.
UNWANTED_PREFIXES = ("COC_", "USE_COC_", "TORCHELASTIC_")


class RankError(RuntimeError):
    """A rank failed or the time limit passed; the message ends with the output of the ranks."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function to call on every rank, with its arguments and its time limit.

    limit
        Seconds after which every rank is ended.
    ends
        Network namespaces of the ranks (`link.shaped_link`); empty for this machine's loopback.
    """

    arguments: dict[str, Any]
    ranks: int
    limit: float
    ends: list[LinkEndpoint] = field(default_factory=list)


def call_on_ranks(
    target: str,
    ranks: int,
    *,
    limit: float,
    link: str | None = None,
    device: str = CPU,
    on_progress: Callable[[str], None] = lambda _: None,
    **arguments: Any,
) -> Any:
    """Call ``function(group, **arguments)`` on `ranks` processes and return rank 0's result.

    target: ``"module:function"``. link: rate of a slow link between the ranks, such as ``1gbit``; None for the
    loopback. device: of each rank, the one of its number (`devices.device_for`); the backend is that of the device.
    Arguments and result must be JSON values. Raises `RankError` if a rank fails or `limit` seconds have
    passed, and `LinkError` if the link cannot be built.
    """
    call = {"target": target, "arguments": arguments, "limit": limit, "device": device}
    place: AbstractContextManager[list[LinkEndpoint]] = nullcontext([]) if link is None else shaped_link(link, ranks)
    with (
        signals_as_exceptions(),
        place as ends,
        tempfile.TemporaryDirectory(prefix="ascend_parallel-ranks-") as name,
    ):
        job, folder = Job(arguments=call, ranks=ranks, limit=limit, ends=ends), Path(name)
        (folder / "job.json").write_text(json.dumps(job.arguments))
        with _started(job, folder) as processes:
            _watch(job, folder, processes, on_progress)
        results = folder / "results.json"
        if not results.exists():
            raise RankError("rank 0 ended without results\n" + _tails(folder, job.ranks))
        return json.loads(results.read_text())


@contextmanager
def _started(job: Job, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        processes = []
        for rank in range(job.ranks):
            prefix = job.ends[rank].prefix if job.ends else []
            command = [*prefix, sys.executable, "-c", PROGRAM, str(folder / "job.json")]
            output = stack.enter_context(_output(folder, rank).open("wb"))
            tree = process_tree(
                command,
                patience=0,
                folder=folder,
                env=_environment(job, rank),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            processes.append(stack.enter_context(tree))
        yield processes


def _environment(job: Job, rank: int) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(UNWANTED_PREFIXES)}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "PYTHONWARNINGS": "ignore",
        "PARENT_PID": str(os.getpid()),
        "PARENT_PACKAGE": PACKAGE,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    return environment | (job.ends[rank].environment if job.ends else {})


def _watch(
    job: Job, folder: Path, processes: list[subprocess.Popen[bytes]], on_progress: Callable[[str], None]
) -> None:
    end = time.monotonic() + job.limit
    shown = ""
    while True:
        codes = [process.poll() for process in processes]
        if failed := [rank for rank, code in enumerate(codes) if code not in (None, 0)]:
            time.sleep(0.5)  # the output of the other ranks often has the reason
            failures = ", ".join(f"rank {rank} ended with status {codes[rank]}" for rank in failed)
            raise RankError(f"{failures}\n{_tails(folder, job.ranks)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise RankError(f"rank {late} not done within {job.limit:.0f} s\n{_tails(folder, job.ranks)}")
        progress = folder / "progress"
        if progress.exists() and (line := progress.read_text()) != shown:
            shown = line
            on_progress(line)
        time.sleep(POLL_SECONDS)


def _tails(folder: Path, ranks: int) -> str:
    texts = [_output(folder, rank).read_text(errors="replace")[-TAIL_CHARACTERS:].strip() for rank in range(ranks)]
    return "\n".join(f"---- rank {rank} printed:\n{text or '(nothing)'}" for rank, text in enumerate(texts))


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


# ---- for the rank's program ------------------------------------------------------------------------------


def report(line: str) -> None:
    """Write a progress line on rank 0; it replaces the line before."""
    if os.environ["RANK"] == "0":
        replace_text(file_of_job("progress"), line)


def file_of_job(name: str) -> Path:
    """Return the path of a file of this rank's job."""
    return Path(sys.argv[1]).with_name(name)
