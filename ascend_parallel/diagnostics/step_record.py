"""Record the steps of an unchanged training program, for `ascend-parallel try`, and end it after a few.

The program's own optimizer is the clock: torch calls hooks before and after every `step`. Each rank writes a line for
each step: its time, and a digest of the parameters that the optimizer updated.
"""

from __future__ import annotations

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
# Seconds in which the ranks of a host have to come to the end of the last step.
PATIENCE = 60.0


class StepRecord:
    """Writes the steps of this rank to a folder; ends the program before the step that follows the last.

    The time of a step is from the end of the step before to its own end, without the time of the digests. The process
    ends without the program's own ending, which may save a checkpoint: nothing but the steps is left of a trial.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        """Record `steps` steps."""
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
        if parameters and parameters[0].device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self._done += 1
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        digested = size <= SMALL_BYTES or self._done == self._steps
        line = {
            "step": self._done,
            "seconds": None if self._left is None else now - self._left,
            "digest": _digest(parameters) if digested else None,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._left = time.perf_counter()

    def _end(self, write_records: Callable[[], object]) -> None:
        """End this process when the ranks of this host are here: one that ends early would break others' sends."""
        write_records()
        own = self._file.with_suffix(".done")
        own.touch()
        ranks, until = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), time.monotonic() + PATIENCE
        while len(list(self._folder.glob("*.done"))) < ranks and time.monotonic() < until:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


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
        _RECORD.append(StepRecord(Path(values["folder"]), int(values["steps"])))
    return _RECORD[0]
