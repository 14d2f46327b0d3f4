"""Where the time of a pipeline's step went, beside what the schedule's simulation says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from ascend_parallel.consistency import exchange
from ascend_parallel.training.pipeline.schedule import Simulated, Slot, StageTimes, simulate


@dataclass(frozen=True)
class Measured:
    """One step on the ranks at the same place of all meshes.

    seconds, busy
        Of each of them: the whole step, and forward and backward of its stages in it.
    simulated
        The same schedule with the medians of the measured times of each stage, and sends that take none.
    """

    seconds: tuple[float, ...]
    busy: tuple[float, ...]
    simulated: Simulated

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they neither ran forward nor backward: bubbles, sends and overhead."""
        return 1 - sum(self.busy) / sum(self.seconds)

    def __str__(self) -> str:
        """Return one line."""
        return f"bubbles {self.bubble:.1%} of a step; simulated {self.simulated.bubble:.1%}"


def measured(
    group: dist.ProcessGroup, schedule: str, stages: int, micro_batches: int, ran: Sequence[Slot], seconds: float
) -> Measured:
    """Return what the ranks of `group`, in the order of the meshes, measured. All of them have to call it."""
    mine = {"seconds": seconds, "busy": sum(slot.stop - slot.start for slot in ran), "medians": _medians(ran)}
    told = list(exchange(group, "Pipeline.measure", mine, RuntimeError).values())
    times = StageTimes(seconds={_key(name): value for one in told for name, value in one["medians"].items()})
    simulated = simulate(schedule, len(told), stages, micro_batches, times)
    return Measured(tuple(one["seconds"] for one in told), tuple(one["busy"] for one in told), simulated)


def _medians(ran: Sequence[Slot]) -> Mapping[str, float]:
    found: dict[str, list[float]] = {}
    for slot in ran:
        found.setdefault(f"{slot.action.kind} {slot.action.stage}", []).append(slot.stop - slot.start)
    return {name: median(times) for name, times in found.items()}


def _key(name: str) -> tuple[str, int]:
    kind, stage = name.split()
    return kind, int(stage)
