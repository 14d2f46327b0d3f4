"""A simulated schedule as text and as a picture, bubbles shaded, and the measured times of a step beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch.distributed as dist

from ascend_parallel.process_groups.consistency import store_all_gather
from ascend_parallel.text.templates import render
from ascend_parallel.tuning.step_time.schedule import WORDS, Action, closed_bubble
from ascend_parallel.tuning.step_time.timing import SimulatedStep, Slot, StageTimes, simulate

MOST_COLUMNS = 240  # of a row of the text; the picture shows all
# The most ranks of which each one's activations are listed.
LISTED = 4
TEMPLATE = Path(__file__).with_name("picture.svg.jinja")


def text(simulated: SimulatedStep) -> str:
    """Return the schedule as text: "F3" is the forward of micro-batch 3, dots are bubbles.

    If ranks have several stages, a letter tells the stage: a for a rank's first, b for its second. A row longer than
    `MOST_COLUMNS` shows its beginning.
    """
    unit = min(slot.stop - slot.start for slots in simulated.slots for slot in slots)
    cells = round(simulated.seconds / unit)
    labels = [[_label(simulated, rank, slot.action) for slot in slots] for rank, slots in enumerate(simulated.slots)]
    width = max(len(label) for row in labels for label in row) + 1
    rows = []
    for rank, slots in enumerate(simulated.slots):
        line = [".".ljust(width)] * cells
        for slot, label in zip(slots, labels[rank], strict=True):
            first, last = round(slot.start / unit), round(slot.stop / unit)
            filled = label.ljust((last - first) * width - 1, "-") + " "
            for place in range(first, last):
                line[place] = filled[(place - first) * width :][:width]
        row = f"rank {rank}  " + "".join(line).rstrip()
        rows.append(row if len(row) <= MOST_COLUMNS else f"{row[: MOST_COLUMNS - 4]} ...")
    return "\n".join((title(simulated), _held(simulated), *rows))


def title(simulated: SimulatedStep) -> str:
    """Return the schedule's name, its numbers, and its bubbles: simulated and by the published formula."""
    ranks = len(simulated.slots)
    closed = closed_bubble(simulated.name, ranks, simulated.stages, simulated.micro_batches)
    formula = "" if closed is None else f", by the formula {closed:.1%}"
    numbers = f"{simulated.stages} stages on {ranks} ranks, {simulated.micro_batches} micro-batches"
    return f"{simulated.name}: {numbers}; bubbles {simulated.bubble:.1%}{formula}"


def _held(simulated: SimulatedStep) -> str:
    """Return the memory of each rank; of more ranks than a line has room for, the least and the most."""
    live = ", ".join(f"{count:g}" for count in simulated.live)
    if len(simulated.live) > LISTED:
        live = " to ".join(f"{count:g}" for count in sorted({min(simulated.live), max(simulated.live)}))
    return f"ranks hold the activations of at most {live} micro-batches"


def svg(*schedules: SimulatedStep) -> str:
    """Return a picture of schedules, below each other on the same time scale."""
    return render(TEMPLATE, schedules=schedules, title=title, held=_held, legend=_legend, which=_which)


def _legend(simulated: SimulatedStep) -> list[tuple[str, str]]:
    """Return the kinds of slots that the schedule has with their names; "" is the kind of bubbles."""
    kinds = [kind for kind in WORDS if any(slot.action.kind == kind for slot in simulated.slots[0])]
    return [*((kind, WORDS[kind]) for kind in kinds), ("", "bubble")]


def _label(simulated: SimulatedStep, rank: int, action: Action) -> str:
    several = simulated.stages > len(simulated.slots)
    which = chr(ord("a") + _which(simulated, rank, action.stage)) if several else ""
    return f"{action.kind}{action.micro_batch}{which}"


def _which(simulated: SimulatedStep, rank: int, stage: int) -> int:
    """Return a stage's place among the stages of its rank, from 0."""
    return sorted({slot.action.stage for slot in simulated.slots[rank]}).index(stage)


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step on the ranks at the same place of all meshes.

    seconds, busy
        For each of these ranks: the time of the step, and the part spent in forward and backward of its stages.
    simulated
        The same schedule, simulated with the medians of each stage's measured times and sends of 0 seconds.
    """

    seconds: tuple[float, ...]
    busy: tuple[float, ...]
    simulated: SimulatedStep

    @property
    def bubble(self) -> float:
        """The share of all ranks' time outside forward and backward: bubbles, sends and overhead."""
        return 1 - sum(self.busy) / sum(self.seconds)

    def __str__(self) -> str:
        """Return one line of text."""
        return f"bubbles {self.bubble:.1%} of a step; simulated {self.simulated.bubble:.1%}"


def measure_step(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    schedule: str,
    stages: int,
    micro_batches: int,
    executed: Sequence[Slot],
    seconds: float,
) -> MeasuredStep:
    """Return the times that `ranks` of `group`, one of each mesh in order, measured. All ranks of it must call it."""
    busy = sum(slot.stop - slot.start for slot in executed)
    mine = {"seconds": seconds, "busy": busy, "medians": _medians(executed)}
    everything = store_all_gather(group, "Pipeline.measure", mine, RuntimeError)
    by_rank = [everything[rank] for rank in ranks]
    times = StageTimes(measured={_key(name): value for times in by_rank for name, value in times["medians"].items()})
    simulated = simulate(schedule, len(by_rank), stages, micro_batches, times)
    seconds_by_rank = tuple(times["seconds"] for times in by_rank)
    return MeasuredStep(seconds_by_rank, tuple(times["busy"] for times in by_rank), simulated)


def _medians(executed: Sequence[Slot]) -> Mapping[str, float]:
    times_by_name: dict[str, list[float]] = {}
    for slot in executed:
        times_by_name.setdefault(f"{slot.action.kind} {slot.action.stage}", []).append(slot.stop - slot.start)
    return {name: median(times) for name, times in times_by_name.items()}


def _key(name: str) -> tuple[str, int]:
    kind, stage = name.split()
    return kind, int(stage)
