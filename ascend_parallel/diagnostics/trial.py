"""Try overlap on a user's own launch: the same command plain and overlapped, for a few steps each, compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ascend_parallel.diagnostics.step_record import VARIABLE
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.tuning.bench.results import interval

PLAIN, OVERLAPPED, RECORDED = "plain", "overlapped", "recorded"
# Steps at the beginning that are not timed: `auto` measures in the first, and memory is allocated.
WARM_UP = 3
LOSS = re.compile(r"\bloss\b[^\d\n+-]{0,24}([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.IGNORECASE)
SAID = re.compile(r"ascend_parallel: (overlap is .*|.*linear layers? (?:is |are )?.*covered.*)")
# The variables that would measure, check or record beside the trial.
OTHERS = ("COC_PARALLEL_NUM", "COC_MODE", "COC_VERIFY", "COC_TIMELINE", "COC_DIGESTS")
END_PATIENCE = 10.0


class TrialError(RuntimeError):
    """A run of a trial failed, took too long, or left no steps; the message has the end of its output."""


@dataclass(frozen=True)
class TrialRun:
    """What one run left: seconds of each step (the slowest rank's), digests by rank and step, losses, log lines."""

    seconds: tuple[float, ...]
    digests: tuple[tuple[str | None, ...], ...]
    losses: tuple[str, ...]
    said: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The comparison of a plain and an overlapped run.

    ratio, interval
        Plain time of a step by the overlapped one's, paired by step: the median, and its 95 % bootstrap interval.
    first_difference
        The first step behind which parameters differ; None if all bits that were compared are equal.
    plain_step_ms, overlapped_step_ms
        Every step's milliseconds, with those that are not timed; 0 for the first, whose beginning is not known.
    comm_ms, exposed_ms
        Milliseconds of the collectives of a step's layers, and those in which a rank computed nothing, waits included;
        None if no layer was recorded.
    """

    command: Sequence[str]
    steps: int
    plain_ms: float
    overlapped_ms: float
    ratio: float
    interval: tuple[float, float]
    plain_step_ms: tuple[float, ...] = field(repr=False)
    overlapped_step_ms: tuple[float, ...] = field(repr=False)
    compared_steps: int
    first_difference: int | None
    plain_losses: tuple[str, ...] = field(repr=False)
    losses: tuple[str, ...] = field(repr=False)
    said: tuple[str, ...]
    comm_ms: float | None
    exposed_ms: float | None

    @property
    def covered(self) -> bool:
        """Whether a layer ran overlapped."""
        return any("covered" in line and not re.search(r"\b0 of \d", line) for line in self.said)

    @property
    def verdict(self) -> str:
        """Say in a sentence whether overlap helps this launch."""
        if not self.covered:
            return "no layer was overlapped: ascend-parallel doctor says why, and docs/frameworks.md what is covered"
        low, high = self.interval
        if low > 1:
            return f"overlap helps: {self.ratio:.2f} times as fast"
        if high < 1:
            return f"overlap costs time here: {self.ratio:.2f} times as fast; leave it off"
        return "no difference seen: there is little to hide here, or more steps are needed"

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        low, high = self.interval
        lines = [
            f"steps     plain {self.plain_ms:.1f} ms, overlapped {self.overlapped_ms:.1f} ms: {self.ratio:.2f} x "
            f"({low:.2f}-{high:.2f}, 95 %, {self.steps} steps)"
        ]
        lines += [f"covered   {line}" for line in self.said] or ["covered   the log names no covered layer"]
        lines.append(f"numbers   {self._bits()}")
        if self.losses:
            lines.append(f"losses    {self._losses()}")
        if self.comm_ms is not None and self.exposed_ms is not None:
            lines.append(
                f"exposed   {self.exposed_ms:.2f} ms of a step, in which a rank waited beside its layers' collectives; "
                f"these take {self.comm_ms:.2f} ms"
            )
        return [*lines, f"verdict   {self.verdict}"]

    def _bits(self) -> str:
        if not self.compared_steps:
            return "parameters were not compared"
        if self.first_difference is None:
            return f"parameters have equal bits on every rank, after {self.compared_steps} steps"
        return (
            f"parameters differ from step {self.first_difference} on: sums run in another order; "
            "COC_DETERMINISTIC=1 has the same bits in all chunks"
        )

    def _losses(self) -> str:
        if self.plain_losses == self.losses:
            return (
                f"{len(self.losses)} losses of the output are equal, to the last digit; the last is {self.losses[-1]}"
            )
        pairs = zip(self.plain_losses, self.losses, strict=False)
        largest = max((abs(float(one) - float(other)) for one, other in pairs), default=0.0)
        return f"largest difference {largest:.2g}; the last are {self.plain_losses[-1:]} and {self.losses[-1]}"

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, with the verdict."""
        return {**vars(self), "command": list(self.command), "covered": self.covered, "verdict": self.verdict}


def try_overlap(
    command: Sequence[str],
    *,
    steps: int,
    limit: float,
    chunks: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> TrialResult:
    """Run a launch plain, overlapped, and overlapped with a record of its layers; compare.

    command
        The words of the launch, such as ``["torchrun", "--nproc-per-node", "2", "train.py"]``, on one host.
    steps
        Steps of the optimizer in each run; the first `WARM_UP` are not timed.
    limit
        Seconds that each run may take.

    Raises `TrialError`; a run that takes too long is ended with all that it started.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, TrialRun] = {}
        for name in (PLAIN, OVERLAPPED, RECORDED):
            progress(f"{name}: {steps} steps")
            place = Path(folder) / name
            place.mkdir()
            runs[name] = _run(command, name, place, steps, limit, chunks)
        rows = _rows(Path(folder) / RECORDED / "timeline")
    plain, overlapped = runs[PLAIN], runs[OVERLAPPED]
    count = min(len(plain.seconds), len(overlapped.seconds)) - WARM_UP
    if count < 2:
        raise TrialError(
            f"{command[0]}: {count + WARM_UP} steps were recorded; give a program of {WARM_UP + 3} or more"
        )
    before, after = (np.array(run.seconds[WARM_UP : WARM_UP + count]) for run in (plain, overlapped))
    compared, different = _compared(plain, overlapped)
    return TrialResult(
        command=command,
        steps=count,
        plain_ms=1e3 * median(before),
        overlapped_ms=1e3 * median(after),
        ratio=float(np.median(before / after)),
        interval=interval(before / after),
        plain_step_ms=tuple(1e3 * seconds for seconds in plain.seconds),
        overlapped_step_ms=tuple(1e3 * seconds for seconds in overlapped.seconds),
        compared_steps=compared,
        first_difference=different,
        plain_losses=plain.losses,
        losses=overlapped.losses,
        said=overlapped.said,
        comm_ms=rows[0] if rows else None,
        exposed_ms=rows[1] if rows else None,
    )


def _run(command: Sequence[str], name: str, folder: Path, steps: int, limit: float, chunks: str) -> TrialRun:
    """Run the command once; return what it left."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                list(command),
                env=_environ(os.environ, name, folder, steps, chunks),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise TrialError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired as error:
            words = f"the {name} run is not done within {limit:g} s (--limit)"
            raise TrialError(f"{words}{_end_of(output)}") from error
        finally:
            _end_all(process)
    if code:
        raise TrialError(f"the {name} run ended with {code}{_end_of(output)}")
    text = output.read_text(encoding="utf-8", errors="replace")
    ranks = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    ]
    if not ranks:
        raise TrialError(
            f"the {name} run took no step of a torch optimizer, or does not load this package (its environment, or "
            f"TORCH_DEVICE_BACKEND_AUTOLOAD=0){_end_of(output)}"
        )
    by_step = list(zip(*ranks, strict=False))
    return TrialRun(
        seconds=tuple(max(line["seconds"] or 0.0 for line in lines) for lines in by_step),
        digests=tuple(tuple(line["digest"] for line in lines) for lines in by_step),
        losses=tuple(LOSS.findall(text)),
        said=tuple(dict.fromkeys(match[0].removeprefix("ascend_parallel: ") for match in SAID.finditer(text))),
    )


def _environ(given: Mapping[str, str], name: str, folder: Path, steps: int, chunks: str) -> dict[str, str]:
    """Return the variables of a run: the user's own, but overlap off or on."""
    values = {key: value for key, value in given.items() if key not in OTHERS}
    if name == PLAIN:
        values = {key: value for key, value in values.items() if not key.startswith(("COC_", "USE_COC_"))}
    else:
        values["COC_PARALLEL_NUM"] = chunks
    if name == RECORDED:
        values["COC_TIMELINE"] = str(folder / "timeline")
        (folder / "timeline").mkdir()
    return values | {VARIABLE: json.dumps({"folder": str(folder), "steps": steps}), "PYTHONUNBUFFERED": "1"}


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + END_PATIENCE
        while number == signal.SIGTERM and time.monotonic() < until and _alive(process):
            time.sleep(0.05)
    process.wait()


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group is left."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end_of(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return "; its output ends:\n" + "\n".join(lines) if lines else "; it printed nothing"


def _compared(plain: TrialRun, overlapped: TrialRun) -> tuple[int, int | None]:
    """Return the number of steps whose parameters were compared, and the first that differs."""
    compared = 0
    for step, (one, other) in enumerate(zip(plain.digests, overlapped.digests, strict=False), start=1):
        if None in one or None in other:
            continue
        compared += 1
        if one != other:
            return compared, step
    return compared, None


def _rows(folder: Path) -> tuple[float, float] | None:
    """Return the milliseconds of a step's collectives, and the exposed ones; None if nothing was recorded."""
    if not any(folder.iterdir()):
        return None
    rows = [row for row in merge(folder).rows() if row.comm]
    return sum(row.comm or 0.0 for row in rows), sum(row.exposed or 0.0 for row in rows)
