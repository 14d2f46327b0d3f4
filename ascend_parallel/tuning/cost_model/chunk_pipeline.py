"""Compute the time of one operator call in chunks, in closed form.

A rank has a compute lane and a communication lane. Each lane runs its tasks in the order in which the host issues
them, one launch after the other. docs/overlap.md has the schedules, docs/predict.md the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf


@dataclass(frozen=True, kw_only=True)
class ChunkedCall:
    """The durations of one call of an overlapped operator, in seconds.

    compute, collective
        The matmul and the collective of each chunk.
    communicate_first
        Whether each collective runs before its matmul (all-gather) or after it.
    own
        The matmul of the rank's own rows, before all chunks; only with communicate_first.
    before
        Collectives that start before the call's own: the all-gather of the layer's input in backward.
    tail
        The weight gradient. It starts after the last matmul, runs during the remaining collectives, and waits for
        `before`. With communicate_first it waits for all chunks.
    issue
        Host seconds per launch. The first launch is free: the host issues it during the previous call.
    """

    compute: tuple[float, ...]
    collective: tuple[float, ...]
    communicate_first: bool = False
    own: float = 0.0
    before: tuple[float, ...] = ()
    tail: float = 0.0
    issue: float = 0.0

    def __post_init__(self) -> None:
        """Refuse lists of unequal length."""
        if len(self.compute) != len(self.collective):
            raise ValueError(f"{len(self.compute)} matmuls do not pair with {len(self.collective)} collectives")


def makespan(call: ChunkedCall) -> float:
    """Return the seconds from the start of the first task to the end of the last, in closed form."""
    return _communicate_first(call) if call.communicate_first else _compute_first(call)


def makespan_beside(call: ChunkedCall, compute_rate: float, collective_rate: float) -> float:
    """Return the makespan if each lane runs at its rate (a share of its own speed) while both lanes run.

    The function steps from one end of a task to the next. It has no host lane: the tasks must include the cost of
    their launches. With both rates 1 the result equals `makespan` of the call with issue 0.
    """
    computing, communicating = _lanes(call)
    i = j = 0  # tasks that each lane has finished
    left, right = computing[0][0], communicating[0][0]
    end = 0.0
    while i < len(computing) or j < len(communicating):
        runs = i < len(computing) and computing[i][1] <= j
        moves = j < len(communicating) and communicating[j][1] <= i
        both = runs and moves and left > 0 and right > 0
        slow, drag = (compute_rate, collective_rate) if both else (1.0, 1.0)
        computed, moved = left / slow if runs else inf, right / drag if moves else inf
        step = min(computed, moved)
        end += step
        if runs:
            i, left = (i + 1, _length(computing, i + 1)) if computed == step else (i, left - step * slow)
        if moves:
            j, right = (j + 1, _length(communicating, j + 1)) if moved == step else (j, right - step * drag)
    return end


def _lanes(call: ChunkedCall) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Return the tasks of both lanes: (seconds, number of tasks of the other lane that must end first)."""
    pieces = len(call.before)
    computing = [(call.own, 0)] if call.communicate_first else []
    communicating = [(time, 0) for time in call.before]
    for i, (compute, collective) in enumerate(zip(call.compute, call.collective, strict=True)):
        computing.append((compute, pieces + i + 1 if call.communicate_first else 0))
        communicating.append((collective, 0 if call.communicate_first else i + 1))
    return [*computing, (call.tail, pieces)], communicating


def _length(tasks: Sequence[tuple[float, int]], index: int) -> float:
    return tasks[index][0] if index < len(tasks) else 0.0


def flow_shop(
    first: Sequence[float],
    second: Sequence[float],
    first_ready: Sequence[float],
    second_ready: Sequence[float],
) -> float:
    """Return the end of the last `second` task, if second[i] follows first[i] and each lane keeps its order.

    The result is the longest path: it starts when a task is ready, follows the first lane, changes to the second lane
    once, and ends there.

        T = max over j of  max(second_ready[j], max over i <= j of (first_ready[i] + first[i] + ... + first[j]))
                           + second[j] + ... + second[-1]
    """
    ends = [0.0, *accumulate(first)]
    rest = [*accumulate(reversed(second), initial=0.0)][::-1]
    latest, result = float("-inf"), 0.0
    for j in range(len(first)):
        latest = max(latest, first_ready[j] - ends[j])
        result = max(result, max(latest + ends[j + 1], second_ready[j]) + rest[j])
    return result


def _compute_first(call: ChunkedCall) -> float:
    count, pieces, issue = len(call.compute), len(call.before), call.issue
    before = _ends(call.before, [issue * i for i in range(pieces)])
    compute_ready = [issue * (pieces + 2 * i) for i in range(count)]
    collective_ready = [max(before, issue * (pieces + 2 * i + 1)) for i in range(count)]
    computed = _ends(call.compute, compute_ready)
    reduced = flow_shop(call.compute, call.collective, compute_ready, collective_ready)
    tail = max(computed, before, issue * (pieces + 2 * count)) + call.tail
    return max(reduced, tail)


def _communicate_first(call: ChunkedCall) -> float:
    count, pieces, issue = len(call.compute), len(call.before), call.issue
    before = _ends(call.before, [issue * i for i in range(pieces)])
    gather_ready = [max(before, issue * (pieces + i)) for i in range(count)]
    own = issue * (pieces + count) + call.own
    compute_ready = [max(own, issue * (pieces + count + 1 + i)) for i in range(count)]
    computed = max(own, flow_shop(call.collective, call.compute, gather_ready, compute_ready))
    return max(computed, before, issue * (pieces + 2 * count + 1)) + call.tail


def _ends(times: Sequence[float], ready: Sequence[float]) -> float:
    """Return the end of a lane's tasks; no task starts before it is ready."""
    end = 0.0
    for time, start in zip(times, ready, strict=True):
        end = max(end, start) + time
    return end
