"""The order in which the ranks of a pipeline run micro-batches. Pure: uses no processes.

The orders are torch.distributed.pipelining's own, so a drawn schedule is what runs. Its import takes seconds, so it is
imported when an order is asked for: a run of one stage needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, inputs", WEIGHT: "backward, weights"}
FORWARDS = ("FORWARD", "SEND_F", "RECV_F")
# Torch's classes by their names here: of one stage on each mesh, and of several.
SINGLE: Mapping[str, str] = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
SEVERAL: Mapping[str, str] = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
SCHEDULES = {**SINGLE, **SEVERAL}
# Schedules that compute the gradients of a stage's inputs and of its weights at different times.
SPLIT = ("zero_bubble", "zbv")


def schedule_class(name: str) -> Any:
    """Return torch's class of a schedule."""
    from torch.distributed import pipelining

    return getattr(pipelining, SCHEDULES[name])


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Inside, make torch's schedule of several stages on a rank run only their forwards.

    The schedule's `eval` leaves out backwards, but not the gradients that stages on one rank hand to each other, on
    which "zbv" fails.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", {})
    complete = dict(orders)
    try:
        for rank, actions in complete.items():
            orders[rank] = [action for action in actions if action.computation_type.name in FORWARDS]
        yield
    finally:
        orders.update(complete)


@dataclass(frozen=True)
class Action:
    """A stage's work on one micro-batch.

    kind
        "F" forward, "B" backward, or its halves: "I" the gradients of the stage's inputs, "W" of its weights.
    """

    kind: str
    stage: int
    micro_batch: int


def stages_of(name: str, ranks: int, stages: int) -> tuple[int, ...]:
    """Return, for each stage, the index of the rank (or mesh) that runs the stage."""
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    ranks_by_stage = generate_stage_to_rank_mapping(ranks, stages, "v" if name == "zbv" else "loop")
    return tuple(ranks_by_stage[stage] for stage in range(stages))


def order(name: str, ranks: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank, in running order.

    Raises `ValueError` for numbers of stages or micro-batches that the schedule cannot run.
    """
    check(name, ranks, stages, micro_batches)
    if name == "1f1b":  # torch's own listing leaves out the last rank's first forward
        return tuple(_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks))
    if name in SINGLE:
        argument: Any = SimpleNamespace(num_stages=stages)
    else:
        attributes = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "submod": None}
        argument = [SimpleNamespace(**attributes) for _ in range(stages // ranks)]
    planned = schedule_class(name)(argument, micro_batches).pipeline_order
    return tuple(
        tuple(
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in planned[rank]
            if action is not None and action.microbatch_index is not None
        )
        for rank in range(ranks)
    )


def closed_bubble(name: str, ranks: int, stages: int, micro_batches: int) -> float | None:
    """Return the bubble's share of a step by the published formula, without sends; None if there is no formula.

    gpipe, 1f1b
        (p - 1) / (m + p - 1): GPipe, arXiv:1811.06965, section 2.3; PipeDream-Flush in Megatron-LM,
        arXiv:2104.04473, section 2.2.1 (there in parts of the time without bubbles: (p - 1) / m).
    interleaved_1f1b
        With v stages on each rank (p - 1) / (v m + p - 1) for m a multiple of p: arXiv:2104.04473, section 2.2.2.
    """
    uneven = name == "interleaved_1f1b" and micro_batches % ranks
    if name not in ("gpipe", "1f1b", "interleaved_1f1b") or uneven:
        return None
    return (ranks - 1) / (stages // ranks * micro_batches + ranks - 1)


def check(name: str, ranks: int, stages: int, micro_batches: int) -> None:
    """Raise `ValueError` for a schedule that cannot run, saying what to give instead."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: give one of {', '.join(SCHEDULES)}")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: give a whole number from 1")
    if name in SINGLE and stages != ranks:
        raise ValueError(
            f"schedule={name!r}, {stages} stages on {ranks} meshes: this schedule has one stage on each mesh; for "
            f"several take {', '.join(SEVERAL)}"
        )
    if stages % ranks or (name == "zbv" and stages != 2 * ranks):
        several = "twice as many stages" if name == "zbv" else "a multiple of that many stages"
        raise ValueError(f"schedule={name!r}, {stages} stages on {ranks} meshes: give {several}")
    if name == "1f1b" and micro_batches < ranks:
        raise ValueError(f"micro_batches={micro_batches}: {name!r} needs at least as many as stages, {ranks}")
    rounds = max(1, micro_batches // ranks)
    if name in ("interleaved_1f1b", "zero_bubble") and micro_batches % rounds:
        fitting = [count for count in range(1, 4 * ranks + 1) if count % max(1, count // ranks) == 0]
        raise ValueError(
            f"micro_batches={micro_batches}: {name!r} on {ranks} meshes runs them in {rounds} rounds of the same "
            f"number; give a multiple of {ranks}, or one of {', '.join(map(str, fitting))}"
        )


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(micro_batches, ranks - rank)
    actions = [Action(FORWARD, rank, number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(Action(BACKWARD, rank, number))
        if number + ahead < micro_batches:
            actions.append(Action(FORWARD, rank, number + ahead))
    return tuple(actions)


def live_of(actions: Sequence[Action], part: float) -> float:
    """Return the most micro-batches whose activations a rank holds at once; a stage's count as `part` of one."""
    return most_held(actions, {action.stage: part for action in actions})


def most_held(actions: Sequence[Action], saved: Mapping[int, float]) -> float:
    """Return the most that a rank holds at once, if a stage's forward of a micro-batch adds ``saved[stage]``."""
    held = most = 0.0
    for action in actions:
        held += {FORWARD: 1, INPUT: 0}.get(action.kind, -1) * saved[action.stage]
        most = max(most, held)
    return most
