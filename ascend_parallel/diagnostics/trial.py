"""Try overlap on a user's own launch: the same command plain and overlapped, for a few steps each, compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ascend_parallel.diagnostics.audit.account import RankTime
from ascend_parallel.diagnostics.audit.events import ProfileError
from ascend_parallel.diagnostics.audit.report import Audit, audit
from ascend_parallel.diagnostics.step_record import VARIABLE
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.tuning.bench.results import interval
from ascend_parallel.tuning.launch.process_tree import process_tree
from ascend_parallel.tuning.launch.signals import signals_as_exceptions

PLAIN, OVERLAPPED, RECORDED = "plain", "overlapped", "recorded"
# Steps at the beginning that are not timed: `auto` measures in the first, and memory is allocated.
WARM_UP = 3
LOSS = re.compile(r"\bloss\b[^\d\n+-]{0,24}([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.IGNORECASE)
SAID = re.compile(r"ascend_parallel: (overlap is .*|.*linear layers? (?:is |are )?.*covered.*)")
# The variables that would measure, check or record beside the trial.
OTHERS = ("COC_PARALLEL_NUM", "COC_MODE", "COC_VERIFY", "COC_TIMELINE", "COC_DIGESTS")
OUTPUT = "; its output ends:"
TELL_SECONDS = 10.0  # between two lines of progress
PATIENCE = 10.0  # seconds that a launch has to end after SIGTERM


class TrialError(RuntimeError):
    """A run of a trial failed, took too long, or left no steps; the message has the end of its output."""


@dataclass(frozen=True)
class TrialRun:
    """What one run left: seconds of each step (the slowest rank's), digests by rank and step, losses, log lines.

    profiled
        Where the time of one forward and backward went, the mean over the ranks; None without a profile.
    unprofiled
        Why there is no profile.
    foreseen
        Ms of a step that this package could save by the profile; None without one.
    """

    seconds: tuple[float, ...]
    digests: tuple[tuple[str | None, ...], ...]
    losses: tuple[str, ...]
    said: tuple[str, ...]
    profiled: RankTime | None = None
    unprofiled: str = ""
    foreseen: float | None = None


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
    unrecorded
        Why the third run has no record, with the end of its output; "" if it ended well.
    plain_profile, overlapped_profile
        Where the time of one forward and backward went, by a profile behind the timed steps (docs/audit.md); None
        without one.
    unprofiled
        Why there is no profile; "" if there is one.
    foreseen_ms
        What `audit` says of the plain run's profile: ms of a step that overlap saves by the cost model.
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
    comm_ms: float | None = None
    exposed_ms: float | None = None
    unrecorded: str = ""
    plain_profile: RankTime | None = None
    overlapped_profile: RankTime | None = None
    unprofiled: str = ""
    foreseen_ms: float | None = None

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
            return f"overlap helps: {self.ratio:.2f} times as fast{self._where()}"
        if high < 1:
            return f"overlap costs time here: {self.ratio:.2f} times as fast; leave it off{self._where()}"
        return f"no difference seen: there is little to hide here, or more steps are needed{self._where()}"

    def _where(self) -> str:
        """Say where the time went, by the profiles of one step; "" without them."""
        plain, overlapped = self.plain_profile, self.overlapped_profile
        if plain is None or overlapped is None:
            return ""
        hosts = "" if plain.host is None or overlapped.host is None else f"{plain.host:.1f} and {overlapped.host:.1f}"
        waits = hosts and f", waiting for the host {hosts} ms"
        return (
            f". Of one profiled step exposed communication is {plain.exposed:.1f} ms plain and "
            f"{overlapped.exposed:.1f} ms overlapped, computation {plain.computing:.1f} and "
            f"{overlapped.computing:.1f} ms{waits}"
        )

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        low, high = self.interval
        lines = [
            f"steps     plain {self.plain_ms:.1f} ms, overlapped {self.overlapped_ms:.1f} ms: {self.ratio:.2f} x "
            f"({low:.2f}-{high:.2f}, 95 %; the median of {self.steps} pairs of steps)"
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
        for name, profile in ((PLAIN, self.plain_profile), (OVERLAPPED, self.overlapped_profile)):
            if profile is not None:
                lines.append(f"profile   {name}: {profile.in_words()}")
        if self.foreseen_ms is not None:
            lines.append(
                f"audit     foresaw {self.foreseen_ms:.1f} ms less of a step by the plain profile; "
                f"{self.plain_ms - self.overlapped_ms:.1f} ms were measured"
            )
        if self.unprofiled:
            lines.append(f"profile   none: {self.unprofiled}")
        if self.unrecorded:
            lines.append(f"exposed   not known: {self.unrecorded.partition(OUTPUT)[0]}")
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
        profiles = {name: None if run is None else asdict(run) for name, run in self._profiles().items()}
        others = {"command": list(self.command), "covered": self.covered, "verdict": self.verdict}
        return {**vars(self), **profiles, **others}

    def _profiles(self) -> dict[str, RankTime | None]:
        return {"plain_profile": self.plain_profile, "overlapped_profile": self.overlapped_profile}


def try_overlap(
    command: Sequence[str],
    *,
    steps: int,
    limit: float,
    chunks: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
    on_compared: Callable[[TrialResult], None] = lambda _: None,
) -> TrialResult:
    """Run a launch plain, overlapped, and overlapped with a record of its layers; compare.

    command
        The words of the launch, such as ``["torchrun", "--nproc-per-node", "2", "train.py"]``, on one host.
    steps
        Steps of the optimizer in each run; the first `WARM_UP` are not timed.
    limit
        Seconds that each run may take.
    on_compared
        Takes the comparison of the first two runs, before the third begins.

    Raises `TrialError` if one of the first two runs fails; a run that takes too long is ended with all that it started.
    """
    with signals_as_exceptions(), tempfile.TemporaryDirectory(prefix="ascend_parallel-try-") as folder:
        trial = TrialRuns(command, steps, limit, chunks, Path(folder), progress)
        result = _result(command, trial.run(PLAIN), trial.run(OVERLAPPED))
        on_compared(replace(result, unrecorded="the recorded run was cut off"))
        try:
            trial.run(RECORDED)
        except TrialError as error:
            return replace(result, unrecorded=str(error))
        comm, exposed = _rows(Path(folder) / RECORDED / "timeline") or (None, None)
        return replace(result, comm_ms=comm, exposed_ms=exposed)


def _result(command: Sequence[str], plain: TrialRun, overlapped: TrialRun) -> TrialResult:
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
        plain_profile=plain.profiled,
        overlapped_profile=overlapped.profiled,
        unprofiled=plain.unprofiled or overlapped.unprofiled,
        foreseen_ms=plain.foreseen,
    )


@dataclass(frozen=True)
class TrialRuns:
    """The runs of a launch; their files are in `folder`.

    timed
        Whether steps are timed and digested here; else only counted, and the last one ends the program.
    wrapped
        Returns the words that start the command in a folder.
    """

    command: Sequence[str]
    steps: int
    limit: float
    chunks: str
    folder: Path
    progress: Callable[[str], None]
    timed: bool = True
    wrapped: Callable[[Sequence[str], Path], Sequence[str]] = lambda command, _: command

    def run(self, name: str) -> TrialRun:
        """Run the command once; return what it left."""
        place = self.folder / name
        place.mkdir()
        self.progress(f"{name}: {self.steps} steps, {self.limit:g} s at most")
        began = time.monotonic()
        output = place / "output.txt"
        self._launch(name, place, output)
        found = _read(name, place, output)
        if not self.timed:
            self.progress(f"{name}: done in {time.monotonic() - began:.0f} s")
            return found
        step = f", {1e3 * median(found.seconds[WARM_UP:]):.1f} ms a step" if found.seconds[WARM_UP:] else ""
        self.progress(f"{name}: done in {time.monotonic() - began:.0f} s{step}")
        return found

    def _launch(self, name: str, place: Path, output: Path) -> None:
        """Start the command and wait for its end; raises `TrialError` for a bad end, or none in time."""
        environ = _environ(os.environ, name, place, self.steps, self.chunks, self.timed)
        with (
            output.open("wb") as file,
            process_tree(
                self.wrapped(self.command, place),
                patience=PATIENCE,
                folder=self.folder,
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            code = self._code(process, name, place)
        if code is None:
            raise TrialError(f"the {name} run is not done within {self.limit:g} s (--limit){_end_of(output)}")
        if code:
            raise TrialError(f"the {name} run ended with {code}{_end_of(output)}")

    def _code(self, process: subprocess.Popen[bytes], name: str, place: Path) -> int | None:
        """Return the exit status, None if there is none in time; meanwhile tell the steps that are done."""
        end = time.monotonic() + self.limit
        while (left := end - time.monotonic()) > 0:
            try:
                return process.wait(min(left, TELL_SECONDS))
            except subprocess.TimeoutExpired:
                self.progress(f"{name}: {_steps_done(place)} of {self.steps} steps are done")
        return process.poll()


def _steps_done(place: Path) -> int:
    """Return how many steps the slowest rank that has taken one has taken."""
    return min((len(path.read_bytes().splitlines()) for path in place.glob("rank*.jsonl")), default=0)


def _read(name: str, folder: Path, output: Path) -> TrialRun:
    """Return the record that a run has left; raises `TrialError` if it has no step."""
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
    audited, unprofiled = step_profile(folder) if name != RECORDED else (None, "")
    return TrialRun(
        seconds=tuple(max(line["seconds"] or 0.0 for line in lines) for lines in by_step),
        digests=tuple(tuple(line["digest"] for line in lines) for lines in by_step),
        losses=tuple(LOSS.findall(text)),
        said=tuple(dict.fromkeys(match[0].removeprefix("ascend_parallel: ") for match in SAID.finditer(text))),
        profiled=None if audited is None else audited.mean,
        unprofiled=unprofiled,
        foreseen=None if audited is None else audited.gain.predicted,
    )


def step_profile(folder: Path) -> tuple[Audit | None, str]:
    """Return the audit of the profiled step; or None, and why there is none."""
    traces = sorted(folder.glob("rank*.trace"))
    if not traces:
        return None, "the program ended with its last step, runs a profiler of its own, or is on NPUs"
    ranks = len(list(folder.glob("rank*.jsonl")))
    if len(traces) < ranks:
        return None, f"{len(traces)} of {ranks} ranks wrote one"
    try:
        return audit(traces), ""
    except ProfileError as error:
        return None, str(error)


def _environ(
    given: Mapping[str, str], name: str, folder: Path, steps: int, chunks: str, timed: bool = True
) -> dict[str, str]:
    """Return the variables of a run: the user's own, but overlap off or on."""
    values = {key: value for key, value in given.items() if key not in OTHERS}
    if name == PLAIN:
        values = {key: value for key, value in values.items() if not key.startswith(("COC_", "USE_COC_"))}
    else:
        values["COC_PARALLEL_NUM"] = chunks
    if name == RECORDED:
        values["COC_TIMELINE"] = str(folder / "timeline")
        (folder / "timeline").mkdir()
    wanted = {"folder": str(folder), "steps": steps, "profiles": timed and name != RECORDED, "digests": timed}
    return values | {VARIABLE: json.dumps(wanted), "PYTHONUNBUFFERED": "1"}


def _end_of(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return f"{OUTPUT}\n" + "\n".join(lines) if lines else "; it printed nothing"


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
