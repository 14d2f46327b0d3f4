"""When the ranks of a pipeline run the actions of a schedule, for given times of its stages. Pure: uses no processes.

`timetable` puts the actions of a schedule in an order in which they can be timed, once; its `slots` and `seconds` time
them, each action as soon as its inputs are ready. A send runs under the sender's next action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ascend_parallel.tuning.step_time.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    check,
    live_of,
    order,
    stages_of,
)

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
# Above so many micro-batches, and rounds of one for each group of ranks, a step's time is extended: it grows evenly.
EXACT, ROUNDS = 64, 4
# Rounds over which this growth is taken.
GROWTH = 2


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a micro-batch's forward and backward on a rank, all its stages together, and of a send.

    Half of the backward is for the inputs, half for the weights.

    measured
        The measured seconds of an action, by (kind of action, stage); they replace those of forward and backward.
    """

    forward: float = 1.0
    backward: float = 2.0
    send: float = 0.0
    measured: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def of(self, kind: str, stage: int, stages_of_rank: int) -> float:
        """Return the seconds of one action."""
        if self.measured:
            return self.measured[kind, stage]
        seconds = {FORWARD: self.forward, BACKWARD: self.backward}.get(kind, self.backward / 2)
        return seconds / stages_of_rank


@dataclass(frozen=True)
class Slot:
    """When an action runs, from `start` to `stop` in seconds."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step of a pipeline.

    slots
        Each rank's slots, in running order.
    live
        For each rank, the most micro-batches whose activations it holds at once. Activations of 1 of a rank's 2 stages
        count as half a micro-batch.
    """

    name: str
    stages: int
    micro_batches: int
    slots: tuple[tuple[Slot, ...], ...]
    live: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """When the last rank finishes."""
        return max(slots[-1].stop for slots in self.slots)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they are idle."""
        busy = sum(slot.stop - slot.start for slots in self.slots for slot in slots)
        return 1 - busy / (self.seconds * len(self.slots))


class TimedAction(NamedTuple):
    """An action with what it waits for.

    duration
        The index of its seconds: of its kind in `KINDS`, times the stages, plus its stage.
    sent, own
        The indices of the actions of the neighbouring stage and of its own that it waits for; -1: none.
    crosses
        Whether `sent` ran on another rank.
    """

    rank: int
    duration: int
    sent: int
    own: int
    crosses: bool


@dataclass(frozen=True)
class Timetable:
    """A schedule's actions in an order in which they can be timed; `live` as in `SimulatedStep`."""

    ranks: int
    stages: int
    orders: tuple[tuple[Action, ...], ...]
    actions: tuple[TimedAction, ...]
    live: tuple[float, ...]

    def ends(self, forward: Sequence[float], backward: Sequence[float], send: float) -> list[float]:
        """Return when each rank finishes; forward and backward in seconds by stage, send between two ranks."""
        halves = [time / 2 for time in backward]
        _, stops = self._spans([*forward, *backward, *halves, *halves], send)
        ends = [0.0] * self.ranks
        for action, stop in zip(self.actions, stops, strict=True):  # a rank's actions stand in running order
            ends[action.rank] = stop
        return ends

    def slots(self, times: StageTimes) -> tuple[tuple[Slot, ...], ...]:
        """Return each rank's slots, in running order."""
        of_kinds = {action.duration for action in self.actions}
        durations = [
            times.of(kind, stage, self.stages // self.ranks) if place * self.stages + stage in of_kinds else 0.0
            for place, kind in enumerate(KINDS)
            for stage in range(self.stages)
        ]
        spans: list[list[tuple[float, float]]] = [[] for _ in range(self.ranks)]
        for timed, start, stop in zip(self.actions, *self._spans(durations, times.send), strict=True):
            spans[timed.rank].append((start, stop))
        return tuple(
            tuple(Slot(action, *span) for action, span in zip(actions, rank_spans, strict=True))
            for actions, rank_spans in zip(self.orders, spans, strict=True)
        )

    def _spans(self, durations: Sequence[float], send: float) -> tuple[list[float], list[float]]:
        """Return when each action starts and stops."""
        free, starts, stops = [0.0] * self.ranks, list[float](), list[float]()
        for rank, duration, sent, own, crosses in self.actions:
            start = free[rank]
            if sent >= 0:
                arrived = stops[sent] + send if crosses else stops[sent]
                start = max(start, arrived)
            if own >= 0 and stops[own] > start:
                start = stops[own]
            free[rank] = start + durations[duration]
            starts.append(start)
            stops.append(free[rank])
        return starts, stops


def simulate(name: str, ranks: int, stages: int, micro_batches: int, times: StageTimes | None = None) -> SimulatedStep:
    """Return when each action runs. By default a backward takes twice a forward. Raises `ValueError` as `order`."""
    table = timetable(name, ranks, stages, micro_batches)
    return SimulatedStep(name, stages, micro_batches, table.slots(times or StageTimes()), table.live)


def rank_ends(
    name: str, ranks: int, micro_batches: int, forward: Sequence[float], backward: Sequence[float], send: float
) -> list[float]:
    """Return when each rank has finished a step's forwards and backwards, as `simulate(...).slots`.

    With many micro-batches the steps of two smaller numbers are extended: further rounds of `ranks` micro-batches take
    as long as the last.
    """
    stages = len(forward)
    small = _small(name, ranks, stages, micro_batches)
    if small == micro_batches:
        return timetable(name, ranks, stages, micro_batches).ends(forward, backward, send)
    fewer = small - GROWTH * ranks
    less, more = (timetable(name, ranks, stages, count).ends(forward, backward, send) for count in (fewer, small))
    further = (micro_batches - small) / (small - fewer)
    return [end + further * (end - before) for before, end in zip(less, more, strict=True)]


def live(name: str, ranks: int, stages: int, micro_batches: int) -> tuple[float, ...]:
    """Return `SimulatedStep.live`: for each rank the most micro-batches whose activations it holds."""
    if name == "gpipe":
        return (float(micro_batches),) * ranks
    return timetable(name, ranks, stages, _small(name, ranks, stages, micro_batches)).live


def _small(name: str, ranks: int, stages: int, micro_batches: int) -> int:
    """Return a smaller number of micro-batches from which a step's time can be extended, or the number itself."""
    check(name, ranks, stages, micro_batches)
    small = max(ROUNDS, EXACT // ranks) * ranks + micro_batches % ranks
    return min(micro_batches, small)


@lru_cache(maxsize=512)
def timetable(name: str, ranks: int, stages: int, micro_batches: int) -> Timetable:
    """Return the timetable of a schedule; raises `ValueError` as `order`."""
    orders, rank_of_stage = order(name, ranks, stages, micro_batches), stages_of(name, ranks, stages)
    numbers: dict[Action, int] = {}
    timed: list[TimedAction] = []
    done = [0] * ranks
    while any(place < len(orders[rank]) for rank, place in enumerate(done)):
        before = len(timed)
        for rank, actions in enumerate(orders):
            for action in actions[done[rank] :]:
                needs = _needs(action, numbers, stages)
                if needs is None:
                    break
                sent, own = needs
                neighbour = action.stage + (-1 if action.kind == FORWARD else 1)
                crosses = sent >= 0 and rank_of_stage[neighbour] != rank
                numbers[action] = len(timed)
                timed.append(TimedAction(rank, KINDS.index(action.kind) * stages + action.stage, sent, own, crosses))
                done[rank] += 1
        assert len(timed) > before, "the schedule waits for itself"
    return Timetable(ranks, stages, orders, tuple(timed), tuple(live_of(actions, ranks / stages) for actions in orders))


def _needs(action: Action, numbers: Mapping[Action, int], stages: int) -> tuple[int, int] | None:
    """Return the actions of the neighbouring stage and of the same stage that come first; None: not timed yet."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind == WEIGHT:
        own = numbers.get(Action(INPUT, stage, micro_batch))
        return None if own is None else (-1, own)
    own = -1 if kind == FORWARD else numbers.get(Action(FORWARD, stage, micro_batch))
    neighbour = stage - 1 if kind == FORWARD else stage + 1
    if own is None:
        return None
    if not 0 <= neighbour < stages:
        return -1, own
    kinds = (FORWARD,) if kind == FORWARD else (BACKWARD, INPUT)
    for source in (Action(source_kind, neighbour, micro_batch) for source_kind in kinds):
        if source in numbers:
            return numbers[source], own
    return None
