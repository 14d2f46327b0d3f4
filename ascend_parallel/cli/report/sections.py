"""The sections of a report: what `doctor`, `bench` and `try` find, as their JSON has it, each in a limited time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ascend_parallel.cli.bench_request import request_of
from ascend_parallel.diagnostics.doctor import examine
from ascend_parallel.diagnostics.trial import OUTPUT, TrialError, try_overlap
from ascend_parallel.patch_control import CONTROL
from ascend_parallel.tuning.bench.results import result_rows
from ascend_parallel.tuning.launch.devices import CPU
from ascend_parallel.tuning.launch.ranks import RankError

EXAMINED = ("versions", "devices", "kernels", "chunks", "tried on")  # sections of doctor; its others quote variables
SHARED_MEMORY = "/dev/shm"  # a path
STEPS = 15  # of each run of `try`


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much `bench` measures on one type of device.

    all_reduce, sequence
        M, K and N of the layers without and with sequence parallelism, which rounds M up to a multiple of the ranks.
    """

    all_reduce: tuple[tuple[int, int, int], ...]
    sequence: tuple[tuple[int, int, int], ...]
    dtype: str = "float32"
    chunks: str = "2,4,8"
    rounds: int


QUICK = Sizes(all_reduce=((256, 256, 256),), sequence=((512, 256, 256),), chunks="2", rounds=3)
ON_CPU = Sizes(
    all_reduce=((512, 512, 512), (1024, 512, 1024), (1024, 1024, 1024)),
    sequence=((512, 1024, 512), (1024, 1024, 1024), (2048, 512, 1024)),
    rounds=5,
)
ON_DEVICE = Sizes(
    all_reduce=((2048, 1024, 4096), (4096, 1024, 8192), (8192, 3584, 8192)),
    sequence=((2048, 4096, 1024), (4096, 4096, 8192), (8192, 8192, 8192)),
    dtype="bfloat16",
    rounds=20,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure: processes, the type of their devices, how much, and the user's own launch, if any."""

    ranks: int
    device: str
    quick: bool
    launch: tuple[str, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """How much `bench` measures."""
        return QUICK if self.quick else ON_CPU if self.device == CPU else ON_DEVICE


@dataclass(frozen=True)
class Section:
    """A part of the report: its name, its time limit in seconds, and the function that measures within the limit."""

    name: str
    limit: float
    measure: Callable[[Request, float], dict[str, Any]]

    def run(self, request: Request) -> dict[str, Any]:
        """Return the results and the seconds spent; of a section that fails, the error instead of results."""
        start = time.monotonic()
        try:
            results = self.measure(request, self.limit)
        except (RankError, OSError, ValueError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
            results = {"error": f"{type(error).__name__}: {error}"}
        return {**results, "seconds": round(time.monotonic() - start, 1)}


def doctor(request: Request, limit: float) -> dict[str, Any]:
    """Return `doctor --group`'s findings about versions, devices and kernels, with each call of its trial."""
    found = examine(CONTROL, request.ranks, device=request.device, time_limit=limit).as_dict()
    # A trial that failed has one error, which the findings of its kernels repeat.
    examined = EXAMINED[:-1] if "error" in found["tried"] else EXAMINED
    kept = [
        finding
        for finding in found["findings"]
        if finding["section"].startswith(examined) and finding["name"] != SHARED_MEMORY
    ]
    return {"findings": kept, "tried": found["tried"]}


def bench(request: Request, limit: float) -> dict[str, Any]:
    """Return the layers' part of `bench --json`, by mode."""
    sizes, modes = request.sizes, {}
    for mode, shapes in (("all-reduce", sizes.all_reduce), ("sequence parallel", sizes.sequence)):
        sequence_parallel = shapes is sizes.sequence
        least = request.ranks if sequence_parallel else 1
        asked = request_of(
            model=None,
            shapes=[f"{-(-m // least) * least},{k},{n}" for m, k, n in shapes],
            layer="both",
            tp=request.ranks,
            seq=None,
            micro_batch=1,
            scale=1,
            sequence_parallel=sequence_parallel,
            dtype=sizes.dtype,
            chunks=sizes.chunks,
            rounds=sizes.rounds,
            link=None,
            device=request.device,
        )
        measured = asked.measure(as_json=True, limit=limit / 2)
        modes[mode] = asked.report(measured, result_rows(asked.names, measured["passes"]))
    return {"modes": modes}


def try_launch(request: Request, limit: float) -> dict[str, Any]:
    """Return the lines that `try` prints for the user's launch, and its JSON without the words of the launch."""
    if not request.launch:
        return {"skipped": "no launch was given behind --"}
    try:
        result = try_overlap(request.launch, steps=STEPS, limit=limit / 3)
    except TrialError as error:  # the program's own output follows the first line
        text = str(error).partition(OUTPUT)[0]
        raise RuntimeError(text.replace(request.launch[0], "the launch", 1)) from error
    unrecorded = result.unrecorded.partition(OUTPUT)[0].replace(request.launch[0], "the launch", 1)
    return {**result.as_dict(), "command": None, "unrecorded": unrecorded, "lines": result.lines()}


SECTIONS = {
    section.name: section
    for section in (Section("doctor", 120, doctor), Section("bench", 300, bench), Section("try", 1800, try_launch))
}
