"""Try overlap on a device that nobody has here: a user's launch on emulated NPUs, timed by a virtual clock.

The package emulated_ascend runs the real torch_npu over an emulated CANN. Kernels and collectives take what its table
says; the host's time is the program's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ascend_parallel.diagnostics.trial import OVERLAPPED, PLAIN, WARM_UP, TrialError, TrialRuns
from ascend_parallel.tuning.launch.signals import signals_as_exceptions

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
NAMED = re.compile(r"(?:^\[emulated ascend\] |^emulated_ascend: |(?=NPU out of memory\.))(.+)$", re.MULTILINE)
MISSING = (
    "--emulated needs the package emulated_ascend beside torch_npu 2.13 in this environment: pip install "
    "./contrib/emulated_ascend of a checkout, or make ascend there"
)
NOTE = (
    "the real torch_npu on an emulated CANN: times of the device are those of a table, the host's are this machine's; "
    "large tensors are not computed, so losses say nothing; nothing ran on an NPU"
)
SHARE_OF_HOST, SHARE_OF_COLLECTIVES = 0.15, 0.05  # of a step, above which they are named


@dataclass(frozen=True)
class EmulatedStep:
    """The median step of the slowest rank in milliseconds.

    step         the whole
    busy         the device computes or copies
    starved      the stream that computes has nothing to do: it waits for the host
    exposed      it waits for a collective
    collectives  all collectives
    host         processor time of the program's threads, and launches
    kernels      kernels of the stream that computes
    memory_mb    device memory that was reserved at most
    """

    step: float
    busy: float
    starved: float
    exposed: float
    collectives: float
    host: float
    kernels: int
    memory_mb: int

    def in_words(self) -> str:
        """Write the step as a line."""
        return (
            f"{self.step:.2f} ms a step: device busy {self.busy:.2f} in {self.kernels} kernels, waiting for the host "
            f"{self.starved:.2f}, exposed {self.exposed:.2f} of {self.collectives:.2f} ms of collectives; host "
            f"{self.host:.2f} ms; {self.memory_mb} MB"
        )


@dataclass(frozen=True, kw_only=True)
class EmulatedResult:
    """The comparison of a plain and an overlapped run on emulated devices.

    ratio  plain step / overlapped step, of the medians
    said   what the overlapped run's log says of coverage
    """

    device: str
    command: Sequence[str]
    steps: int
    plain: EmulatedStep
    overlapped: EmulatedStep
    said: tuple[str, ...] = field(default=())

    @property
    def ratio(self) -> float:
        """Return how many times as fast the overlapped step is."""
        return self.plain.step / self.overlapped.step

    @property
    def verdict(self) -> str:
        """Say whether overlap would help, and what stands in the way."""
        if not any("covered" in line and not re.search(r"\b0 of \d", line) for line in self.said):
            return "no layer was overlapped: ascend-parallel doctor says why, and docs/frameworks.md what is covered"
        plain, ours = self.plain, self.overlapped
        if ours.starved > SHARE_OF_HOST * ours.step:
            share = (
                f"{ours.starved / ours.step:.0%} of the overlapped step, {plain.starved / plain.step:.0%} of plain's"
            )
            return (
                f"{self.ratio:.2f} times as fast; the host is in the way: the device waits for it {share}; larger "
                "micro-batches or fewer chunks help"
            )
        if plain.exposed < SHARE_OF_COLLECTIVES * plain.step:
            return f"{self.ratio:.2f} times as fast; there is little to hide: exposed {plain.exposed:.2f} ms of plain's"
        return f"{self.ratio:.2f} times as fast; exposed {plain.exposed:.2f} -> {ours.exposed:.2f} ms of a step"

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        return [
            f"device    {self.device}, emulated; medians of {self.steps} steps",
            f"plain     {self.plain.in_words()}",
            f"overlap   {self.overlapped.in_words()}",
            *([f"covered   {line}" for line in self.said] or ["covered   the log names no covered layer"]),
            f"emulated  {NOTE}",
            f"verdict   {self.verdict}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, with ratio, verdict and note."""
        runs = {PLAIN: asdict(self.plain), OVERLAPPED: asdict(self.overlapped)}
        return {**vars(self), **runs, "ratio": self.ratio, "verdict": self.verdict, "note": NOTE}


def try_emulated(
    command: Sequence[str],
    device: str,
    *,
    steps: int,
    limit: float,
    chunks: str = "auto",
    host: str = "1",
    lanes: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> EmulatedResult:
    """Run a launch on emulated devices, plain and overlapped; compare the virtual clock's times.

    device, host  as `emulated_ascend run --device --host` takes them
    lanes         a folder for the lanes of both runs, traces for Perfetto

    Raises `ValueError` without emulated_ascend, `TrialError` if a run fails; the message begins with the emulation's.
    """
    if importlib.util.find_spec("emulated_ascend") is None or importlib.util.find_spec("torch_npu") is None:
        raise ValueError(MISSING)
    with signals_as_exceptions(), tempfile.TemporaryDirectory(prefix="ascend_parallel-try-") as folder:

        def wrapped(words: Sequence[str], place: Path) -> list[str]:
            options = ["--device", device, "--host", host]
            options += ["--summary", str(place / "summary.json"), "--lanes", str(place / "lanes.json")]
            # The command itself loads torch_npu, which this process could not.
            command = ["env", "-u", AUTOLOAD] if os.environ.get(AUTOLOAD) == "0" else []
            return [*command, sys.executable, "-m", "emulated_ascend", "run", "--clock", *options, "--", *words]

        runs = TrialRuns(command, steps, limit, chunks, Path(folder), progress, timed=False, wrapped=wrapped)
        said: tuple[str, ...] = ()
        medians = {}
        for name in (PLAIN, OVERLAPPED):
            try:
                said = runs.run(name).said
            except TrialError as error:
                output = Path(folder) / name / "output.txt"
                text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
                raise TrialError(reason_first(str(error), text)) from error
            place = Path(folder) / name
            medians[name] = _median(place / "summary.json", name)
            if lanes is not None:
                lanes.mkdir(parents=True, exist_ok=True)
                shutil.copy(place / "lanes.json", lanes / f"{name}.json")
        return EmulatedResult(
            device=device,
            command=command,
            steps=steps - WARM_UP,
            plain=medians[PLAIN],
            overlapped=medians[OVERLAPPED],
            said=said,
        )


def reason_first(message: str, output: str) -> str:
    """Put what the emulation says of the failure, anywhere in the output, before the message."""
    said = NAMED.findall(output)
    return f"{said[-1]}\n{message}" if said else message


def _median(path: Path, name: str) -> EmulatedStep:
    """Return the median step of the slowest rank behind the warm-up; `path` is emulated_ascend's summary."""
    found = json.loads(path.read_text()) if path.exists() else {}
    # The summary leaves out the first step that has a beginning, the second of all.
    by_rank = [steps[WARM_UP - 2 :] for steps in found.get("steps", {}).values()]
    if not by_rank or min(map(len, by_rank)) < 2:
        raise TrialError(f"the {name} run left too few steps of the virtual clock; give a program of more steps")
    slowest = max(by_rank, key=lambda steps: median(step["step"] for step in steps))
    middle = {field: median(step[field] for step in slowest) for field in slowest[0]}
    return EmulatedStep(**{**middle, "kernels": int(middle["kernels"])}, memory_mb=found["memory_mb"])
