"""Simulate tasks on lanes event by event, to check the closed forms."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall

COMPUTE, COMMUNICATE, HOST = "compute", "communicate", "host"


@dataclass(frozen=True)
class Task:
    """Work that occupies a lane for `seconds`, after the tasks named in `after` have ended."""

    name: str
    lane: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskSpan:
    """The start and end of a task."""

    task: Task
    start: float
    end: float


def simulate(tasks: Sequence[Task]) -> list[TaskSpan]:
    """Return the spans of the tasks in order of their starts; each lane runs one task at a time, in the given order.

    Raises `ValueError` for a name used twice, an unknown name in `after`, and tasks that wait for each other.
    """
    waiting, followers = _dependencies(tasks)
    queues: dict[str, deque[Task]] = defaultdict(deque)
    for task in tasks:
        queues[task.lane].append(task)
    busy: set[str] = set()
    events: list[tuple[float, int, Task]] = []
    spans: list[TaskSpan] = []
    now = 0.0

    def start(lane: str) -> None:
        """Start the lane's next task if the lane is free and the task waits for nothing."""
        queue = queues[lane]
        if queue and lane not in busy and not waiting[queue[0].name]:
            task = queue.popleft()
            busy.add(lane)
            spans.append(TaskSpan(task, now, now + task.seconds))
            heapq.heappush(events, (now + task.seconds, len(spans), task))

    for lane in queues:
        start(lane)
    while events:
        now, _, ended = heapq.heappop(events)
        busy.discard(ended.lane)
        lanes = {ended.lane}
        for follower in followers[ended.name]:
            waiting[follower.name] -= 1
            lanes.add(follower.lane)
        for lane in sorted(lanes):
            start(lane)
    if len(spans) < len(tasks):
        stuck = next(queue[0].name for queue in queues.values() if queue)
        raise ValueError(f"{stuck!r} never starts: tasks wait for each other")
    return spans


def length(spans: Sequence[TaskSpan]) -> float:
    """Return the end of the last task."""
    return max((span.end for span in spans), default=0.0)


def call_tasks(call: ChunkedCall) -> list[Task]:
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


def pipeline_tasks(stages: list[tuple[float, float]], micro_batches: int) -> list[Task]:
    """Return 1F1B as tasks for `simulate`, with one lane per stage and no hops, to check the closed form."""
    count, result = len(stages), []
    for stage, (forward, backward) in enumerate(stages):
        warm = min(micro_batches, count - stage)
        order = [("F", i) for i in range(warm)]
        for i in range(micro_batches):
            order.append(("B", i))
            if warm + i < micro_batches:
                order.append(("F", warm + i))
        for kind, index in order:
            if kind == "F":
                after = (f"F{stage - 1}.{index}",) if stage else ()
                result.append(Task(f"F{stage}.{index}", str(stage), forward, after))
            else:
                after = (f"B{stage + 1}.{index}",) if stage < count - 1 else ()
                result.append(Task(f"B{stage}.{index}", str(stage), backward, (*after, f"F{stage}.{index}")))
    return result


def _dependencies(tasks: Sequence[Task]) -> tuple[dict[str, int], dict[str, list[Task]]]:
    """Return by task name: the number of tasks that a task waits for, and the list of tasks that wait for it."""
    waiting = {task.name: len(task.after) for task in tasks}
    if len(waiting) < len(tasks):
        raise ValueError("two tasks have the same name")
    followers: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        for name in task.after:
            if name not in waiting:
                raise ValueError(f"{task.name!r} waits for {name!r}, which is not a task")
            followers[name].append(task)
    return waiting, followers
