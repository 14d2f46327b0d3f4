"""Start the training script on every rank of a run, on the loopback or over a slow link, and read its report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ascend_parallel.tuning.launch.link import LinkEndpoint
from ascend_parallel.tuning.launch.process_tree import process_tree

TRAIN = Path(__file__).with_name("train.py")
OURS = "ascend_parallel: "  # with which begins what the package says
PREFIXES = ("COC_", "USE_COC_")  # of every variable the package reads; none of the caller's reaches a run
TIME_LIMIT = 300.0  # seconds a run may take; the whole demo needs a minute or two

Report = dict[str, Any]


class RunFailed(Exception):
    """A rank that ended badly, or too late, with the output of all ranks."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all runs have in common: the model's flags, and the place of every rank (no `ends`: the loopback)."""

    ranks: int
    steps: int
    flags: list[str]
    ends: list[LinkEndpoint]


def train(title: str, variables: dict[str, str], setup: Setup, progress: Progress) -> Report:
    """Train on ``setup.ranks`` processes with `variables` set, and return the report of rank 0."""
    task = progress.add_task(title, total=setup.steps)
    with tempfile.TemporaryDirectory(prefix="gpt-demo-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(TRAIN), "--steps", str(setup.steps), "--report", str(report), *setup.flags]
        environments = [_environment(variables, rank, setup) for rank in range(setup.ranks)]
        _share_port(environments)
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(setup.ranks)]
        commands = [[*setup.ends[rank].prefix, *command] if setup.ends else command for rank in range(setup.ranks)]
        with _processes(commands, environments, logs) as processes:
            _wait(processes, logs, title, lambda steps: progress.update(task, completed=steps))
        said = [line.removeprefix(OURS) for line in _lines(logs[0]) if line.startswith(OURS)]
        return {**json.loads(report.read_text(encoding="utf-8")), "said": said}


def _environment(variables: dict[str, str], rank: int, setup: Setup) -> dict[str, str]:
    """Return this process's environment without our variables, with `variables` and what a rank needs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    if sys.platform == "linux":  # gloo asks for the host's name otherwise, which a container may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("OMP_NUM_THREADS", "1")
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(setup.ranks), "MASTER_ADDR": "127.0.0.1"}
    linked = setup.ends[rank].environment if setup.ends else {}
    return environment | ours | linked | variables


def _share_port(environments: list[dict[str, str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for environment in environments:
        environment["MASTER_PORT"] = port


@contextlib.contextmanager
def _processes(
    commands: list[list[str]], environments: list[dict[str, str]], logs: list[Path]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one process per command, its output in its log; none outlives the context."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command, environment, log in zip(commands, environments, logs, strict=True):
            output = stack.enter_context(log.open("wb"))
            tree = process_tree(
                command, patience=0, folder=log.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            processes.append(stack.enter_context(tree))
        yield processes


def _wait(
    processes: list[subprocess.Popen[bytes]], logs: list[Path], title: str, show_steps: Callable[[int], None]
) -> None:
    """Wait until all have ended well, reporting the steps done; raise `RunFailed` as soon as one has not."""
    start = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        show_steps(sum(line.startswith("step") for line in _lines(logs[0])))
        if any(codes):
            time.sleep(1)  # let the others say what they saw of it
            raise RunFailed(_failure(title, [process.poll() for process in processes], logs))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() - start > TIME_LIMIT:
            raise RunFailed(_failure(f"{title}: no end after {TIME_LIMIT:.0f} s", codes, logs))
        time.sleep(0.1)


def _failure(title: str, codes: list[int | None], logs: list[Path]) -> str:
    lines = [f"The run «{title}» failed."]
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        lines += [f"--- rank {rank}: {_ending(code)}, its last lines:", *_lines(log)[-25:]]
    return "\n".join(lines)


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _ending(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
