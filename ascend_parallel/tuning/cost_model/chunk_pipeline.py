"""How long one call of an operator takes, cut into chunks: closed form, and the same as a list of tasks to simulate.

A rank has two lanes, one that computes and one that communicates, each first come, first served, and
a host that issues what they do, one launch after the other. docs/overlap.md has the schedules,
docs/predict.md the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from ascend_parallel.tuning.cost_model.simulation import Task

COMPUTE, COMMUNICATE, HOST = "compute", "communicate", "host"


@dataclass(frozen=True, kw_only=True)
class ChunkedCall:
    """One call as durations in seconds; chunk i is ``compute[i]`` and ``collective[i]``.

    communicate_first
        Collectives come before their matmuls (all-gather) instead of after them.
    own
        Matmul of the rows that need no collective, before all chunks; communicate_first only.
    before
        Collectives that are started before everything else: the input gathered again in backward.
    tail
        Computation after the last matmul, under what is left of the collectives: the weight
        gradient. It waits for `before`, and where communication comes first for all chunks.
    issue
        Host seconds per launch. The first launch is free: the host issued it while the call before ran.
    """

    compute: tuple[float, ...]
    collective: tuple[float, ...]
    communicate_first: bool = False
    own: float = 0.0
    before: tuple[float, ...] = ()
    tail: float = 0.0
    issue: float = 0.0

    def __post_init__(self) -> None:
        """Refuse chunks without a partner."""
        if len(self.compute) != len(self.collective):
            raise ValueError(f"{len(self.compute)} matmuls do not pair with {len(self.collective)} collectives")


def makespan(call: ChunkedCall) -> float:
    """Return the seconds from the first task's start to the last one's end, in closed form."""
    return _communicate_first(call) if call.communicate_first else _compute_first(call)


def makespan_beside(call: ChunkedCall, compute_rate: float, collective_rate: float) -> float:
    """Return the makespan where each lane goes at its rate (a share of its own speed) while both run.

    Step by step: between two ends of tasks nothing changes. Launches are not issued by a lane of their own here:
    where they cost, they belong to the tasks. With rates of 1 it is `makespan` of a call whose issue is 0.
    """
    computing, communicating = _lanes(call)
    i = j = 0  # tasks that each lane has ended
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
    """Return what computes and what communicates: seconds, and how many tasks of the other lane go before."""
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
    """Return when the last `second` ends, where second[i] follows first[i] and each lane keeps its order.

    The longest way through both lanes: it begins when some task is ready, runs along the first lane,
    changes to the second once, and ends there.

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


def tasks(call: ChunkedCall) -> list[Task]:
    """Return the call as tasks for `simulate`, in the order in which the host issues them."""
    chunks = range(len(call.compute))
    device = [Task(f"before {i}", COMMUNICATE, time) for i, time in enumerate(call.before)]
    if call.communicate_first:
        device += [Task(f"collective {i}", COMMUNICATE, call.collective[i]) for i in chunks]
        device += [Task("own", COMPUTE, call.own)]
        device += [Task(f"compute {i}", COMPUTE, call.compute[i], (f"collective {i}",)) for i in chunks]
    else:
        for i in chunks:
            device.append(Task(f"compute {i}", COMPUTE, call.compute[i]))
            device.append(Task(f"collective {i}", COMMUNICATE, call.collective[i], (f"compute {i}",)))
    device.append(Task("tail", COMPUTE, call.tail, tuple(f"before {i}" for i in range(len(call.before)))))
    issued = []
    for index, task in enumerate(device):
        issued.append(Task(f"issue {task.name}", HOST, call.issue if index else 0.0))
        issued.append(Task(task.name, task.lane, task.seconds, (*task.after, f"issue {task.name}")))
    return issued


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
    """Return when one lane has done tasks of these times, each not before it is ready."""
    end = 0.0
    for time, start in zip(times, ready, strict=True):
        end = max(end, start) + time
    return end
