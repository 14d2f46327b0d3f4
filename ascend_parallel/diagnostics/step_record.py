"""Record the steps of an unchanged training program, for `ascend-parallel try`, and end it after a few.

The program's own optimizer is the clock: torch calls hooks before and after every `step`. Each rank writes a line for
each step: its time, and a digest of the parameters that the optimizer updated.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIABLE = "ASCEND_PARALLEL_TRIAL"
# Parameters of more bytes than this are digested behind the last step alone.
SMALL_BYTES = 64e6
# Seconds that the ranks of a host have to come to the profile, and to the end of the last step.
PATIENCE = 60.0


class StepRecord:
    """Writes the steps of this rank to a folder; ends the program before the step that follows the last.

    The time of a step is from the end of the step before to its own end, without the time of the digests. The process
    ends without the program's own ending, which may save a checkpoint: nothing but the steps is left of a trial.
    """

    def __init__(self, folder: Path, steps: int, *, profiles: bool = False, digests: bool = True) -> None:
        """Record `steps` steps; `profiles`: also a profile of the forward and backward behind them, which end the run.

        digests
            Wait for the device behind each step and digest parameters. Not under emulated_ascend's clock, which times
            steps itself and computes no large tensor.

        The profile is ``rank<rank>.trace`` of torch.profiler. There is none where the program runs a profiler of its
        own, and none of NPUs, whose profiler is another.
        """
        self._profiles, self._digests = profiles, digests
        self._profiler: torch.profiler.profile | None = None
        self._folder, self._steps = folder, steps
        self._file = folder / f"rank{os.environ.get('RANK', '0')}.jsonl"
        self._clock: int | None = None
        self._done = 0
        self._left: float | None = None

    def before(self, optimizer: torch.optim.Optimizer, write_records: Callable[[], object]) -> None:
        """End the program if all steps are done; the first optimizer that steps counts them.

        write_records: called at the end, to write what an exit of the program would write.
        """
        self._clock = id(optimizer) if self._clock is None else self._clock
        if id(optimizer) == self._clock and self._done == self._steps:
            self._end(write_records)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Write a line for a step."""
        if id(optimizer) != self._clock:
            return
        parameters = [
            getattr(parameter, "_local_tensor", parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        if self._digests and parameters and parameters[0].device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self._done += 1
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        digested = self._digests and (size <= SMALL_BYTES or self._done == self._steps)
        line = {
            "step": self._done,
            "seconds": None if self._left is None else now - self._left,
            "digest": _digest(parameters) if digested else None,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._profiles and self._done == self._steps:
            self._profiler = _profiler(parameters)
            self._meet(".profiled")  # a rank that begins earlier would seem to wait for collectives
        self._left = time.perf_counter()

    def _end(self, write_records: Callable[[], object]) -> None:
        """End this process when the ranks of this host are here: one that ends early would break others' sends."""
        if self._profiler is not None:
            _export(self._profiler, self._file.with_suffix(".trace"))
        write_records()
        self._meet(".done")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _meet(self, suffix: str) -> None:
        """Wait until all ranks of this host are here, or `PATIENCE` is over; each leaves a file with the suffix."""
        self._file.with_suffix(suffix).touch()
        ranks, until = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), time.monotonic() + PATIENCE
        while len(list(self._folder.glob(f"*{suffix}"))) < ranks and time.monotonic() < until:
            time.sleep(0.001)


def _profiler(parameters: list[Any]) -> torch.profiler.profile | None:
    """Return a profiler that runs, or None where the program has one or this device has its own."""
    if _profiles_itself() or any(one.device.type == "npu" for one in parameters[:1]):
        return None
    profiler = torch.profiler.profile(activities=list(_kineto_activities()), record_shapes=True)
    profiler.start()
    return profiler


def _profiles_itself() -> bool:
    """Tell whether the program has a profiler, running or scheduled: torch has one at a time, and the second breaks."""
    kind = torch.profiler.profiler._KinetoProfile
    return torch.autograd.profiler._is_profiler_enabled or any(issubclass(type(one), kind) for one in gc.get_objects())


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace whole or not at all; a failure is told, and ends nothing: other ranks wait for this one's end."""
    part = path.with_suffix(".part")
    if not torch.autograd.profiler._is_profiler_enabled:  # the program began one meanwhile, which ended this one
        return
    try:
        profiler.stop()
        profiler.export_chrome_trace(str(part))
        part.replace(path)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"ascend_parallel: the profile of a step was not written: {error}\n")


def _kineto_activities() -> set[Any]:
    supported: Callable[[], set[Any]] = torch.profiler.supported_activities
    return supported()


def _digest(parameters: list[Any]) -> str:
    found = hashlib.sha1(usedforsecurity=False)
    for parameter in parameters:
        values = parameter.detach().reshape(-1).contiguous().cpu()
        found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


_RECORD: list[StepRecord] = []


def record_of_environment() -> StepRecord:
    """Return this process's record, by the folder and the number of steps that the variable has."""
    if not _RECORD:
        values = json.loads(os.environ[VARIABLE])
        wanted = {
            name: bool(values.get(name, otherwise)) for name, otherwise in (("profiles", False), ("digests", True))
        }
        _RECORD.append(StepRecord(Path(values["folder"]), int(values["steps"]), **wanted))
    return _RECORD[0]
