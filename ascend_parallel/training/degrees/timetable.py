"""The time of a pipeline's step for given times of its stages: as `simulate`, with the order worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ascend_parallel.training.pipeline.schedule import (
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


@dataclass(frozen=True)
class Timetable:
    """A schedule's actions in an order in which they can be timed.

    actions
        For each: the rank, the index of its duration, the actions that it waits for (-1: none), and whether the first
        of these comes from another rank.
    live
        For each rank the most micro-batches whose activations it holds, as in `Simulated.live`.
    """

    ranks: int
    stages: int
    actions: tuple[tuple[int, int, int, int, bool], ...]
    live: tuple[float, ...]

    def seconds(self, forward: Sequence[float], backward: Sequence[float], send: float) -> float:
        """Return when the last rank finishes; forward and backward in seconds by stage, send between two ranks."""
        halves = [time / 2 for time in backward]
        durations = [*forward, *backward, *halves, *halves]
        free, stops = [0.0] * self.ranks, list[float]()
        for rank, code, source, own, crosses in self.actions:
            start = free[rank]
            if source >= 0:
                arrived = stops[source] + send if crosses else stops[source]
                start = max(start, arrived)
            if own >= 0 and stops[own] > start:
                start = stops[own]
            free[rank] = start + durations[code]
            stops.append(free[rank])
        return max(free)


def step_seconds(
    name: str, ranks: int, micro_batches: int, forward: Sequence[float], backward: Sequence[float], send: float
) -> float:
    """Return the seconds of a step's forwards and backwards, as `simulate(...).seconds`.

    With many micro-batches the steps of two smaller numbers are extended: further rounds of `ranks` micro-batches take
    as long as the last.
    """
    stages = len(forward)
    small = _small(name, ranks, stages, micro_batches)
    if small == micro_batches:
        return timetable(name, ranks, stages, micro_batches).seconds(forward, backward, send)
    fewer = small - GROWTH * ranks
    less, more = (timetable(name, ranks, stages, count).seconds(forward, backward, send) for count in (fewer, small))
    return more + (micro_batches - small) / (small - fewer) * (more - less)


def live(name: str, ranks: int, stages: int, micro_batches: int) -> tuple[float, ...]:
    """Return `Simulated.live`: for each rank the most micro-batches whose activations it holds."""
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
    todo, rank_of_stage = order(name, ranks, stages, micro_batches), stages_of(name, ranks, stages)
    number: dict[Action, int] = {}
    actions: list[tuple[int, int, int, int, bool]] = []
    done = [0] * ranks
    while any(place < len(todo[rank]) for rank, place in enumerate(done)):
        before = len(actions)
        for rank, planned in enumerate(todo):
            for action in planned[done[rank] :]:
                needs = _needs(action, number, stages)
                if needs is None:
                    break
                source, own = needs
                place = action.stage + (-1 if action.kind == FORWARD else 1)
                crosses = source >= 0 and rank_of_stage[place] != rank
                number[action] = len(actions)
                actions.append((rank, KINDS.index(action.kind) * stages + action.stage, source, own, crosses))
                done[rank] += 1
        assert len(actions) > before, "the schedule waits for itself"
    return Timetable(ranks, stages, tuple(actions), tuple(live_of(planned, ranks / stages) for planned in todo))


def _needs(action: Action, number: dict[Action, int], stages: int) -> tuple[int, int] | None:
    """Return the actions of the neighbouring stage and of the same stage that come first; None: not timed yet."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind == WEIGHT:
        own = number.get(Action(INPUT, stage, micro_batch))
        return None if own is None else (-1, own)
    own = -1 if kind == FORWARD else number.get(Action(FORWARD, stage, micro_batch))
    neighbour = stage - 1 if kind == FORWARD else stage + 1
    if own is None:
        return None
    if not 0 <= neighbour < stages:
        return -1, own
    kinds = (FORWARD,) if kind == FORWARD else (BACKWARD, INPUT)
    found = [number[each] for each in (Action(other, neighbour, micro_batch) for other in kinds) if each in number]
    return (found[0], own) if found else None
