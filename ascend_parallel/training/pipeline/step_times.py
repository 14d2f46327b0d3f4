"""The measured times of a pipeline's step, beside the schedule's simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from ascend_parallel.consistency import exchange
from ascend_parallel.training.pipeline.schedule import Simulated, Slot, Times, simulate


@dataclass(frozen=True)
class Measured:
    """A measured step on the ranks at the same place of all meshes.

    seconds, busy
        For each of these ranks: the time of the step, and the part spent in forward and backward of its stages.
    simulated
        The same schedule, simulated with the medians of each stage's measured times and sends of 0 seconds.
    """

    seconds: tuple[float, ...]
    busy: tuple[float, ...]
    simulated: Simulated

    @property
    def bubble(self) -> float:
        """The share of all ranks' time outside forward and backward: bubbles, sends and overhead."""
        return 1 - sum(self.busy) / sum(self.seconds)

    def __str__(self) -> str:
        """Return one line of text."""
        return f"bubbles {self.bubble:.1%} of a step; simulated {self.simulated.bubble:.1%}"


def measure_step(
    group: dist.ProcessGroup, schedule: str, stages: int, micro_batches: int, executed: Sequence[Slot], seconds: float
) -> Measured:
    """Return the times that the ranks of `group`, in the order of the meshes, measured. All of them must call it."""
    busy = sum(slot.stop - slot.start for slot in executed)
    mine = {"seconds": seconds, "busy": busy, "medians": _medians(executed)}
    by_rank = list(exchange(group, "Pipeline.measure", mine, RuntimeError).values())
    times = Times(measured={_key(name): value for times in by_rank for name, value in times["medians"].items()})
    simulated = simulate(schedule, len(by_rank), stages, micro_batches, times)
    seconds_by_rank = tuple(times["seconds"] for times in by_rank)
    return Measured(seconds_by_rank, tuple(times["busy"] for times in by_rank), simulated)


def _medians(executed: Sequence[Slot]) -> Mapping[str, float]:
    times_by_name: dict[str, list[float]] = {}
    for slot in executed:
        times_by_name.setdefault(f"{slot.action.kind} {slot.action.stage}", []).append(slot.stop - slot.start)
    return {name: median(times) for name, times in times_by_name.items()}


def _key(name: str) -> tuple[str, int]:
    kind, stage = name.split()
    return kind, int(stage)
