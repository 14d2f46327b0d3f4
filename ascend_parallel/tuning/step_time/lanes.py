"""The lanes of a step as spans, and as an HTML page: what each rank computes, and what its link moves beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ascend_parallel.text.templates import render
from ascend_parallel.tuning.step_time import schedule
from ascend_parallel.tuning.step_time.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from ascend_parallel.tuning.step_time.step import StepWork, backward_of_rank, pipeline_ends, time_step
from ascend_parallel.tuning.step_time.timing import StageTimes, timetable

TEMPLATE = Path(__file__).with_name("lanes.html.jinja")
SUM, GATHER, UPDATE = "S", "G", "U"
WORDS = {**schedule.WORDS, SUM: "sums of gradients", GATHER: "gathers of weights", UPDATE: "optimizer"}
# Micro-batches of a picture: two for each rank of a pipeline, and at least eight; a step with more is drawn with these.
LEAST_DRAWN, DRAWN_PER_RANK = 8, 2
# Buckets of sums that are drawn one by one; more are drawn as so many.
MOST_BUCKETS = 32


@dataclass(frozen=True)
class Span:
    """Work on a lane, from `start` to `stop` in seconds; `kind` is a key of `WORDS`."""

    kind: str
    label: str
    start: float
    stop: float


@dataclass(frozen=True)
class StepLane:
    """A rank's compute, or its link; the spans do not overlap."""

    name: str
    spans: tuple[Span, ...]


def drawn(work: StepWork) -> StepWork:
    """Return the step with the micro-batches that a picture has."""
    most = max(LEAST_DRAWN, DRAWN_PER_RANK * work.ranks)
    rounds = max(1, most // work.ranks)
    return replace(work, micro_batches=min(work.micro_batches, rounds * work.ranks))


def lanes(work: StepWork) -> list[StepLane]:
    """Return two lanes for each rank of a pipeline; the last span ends when `time_step` says that the step ends."""
    ends, passes = pipeline_ends(work), _passes(work)
    sums = [list(_sums(work, rank, end)) for rank, end in enumerate(ends)]
    times = time_step(work)
    start = times.pipeline + times.gradients
    result = []
    for rank in range(work.ranks):
        gathered = start + work.gathers[rank]
        update = Span(UPDATE, "", gathered, gathered + work.optimizer[rank])
        moved = [*sums[rank], Span(GATHER, "", start, gathered)]
        result.append(StepLane(f"rank {rank}", _lasting([*passes[rank], update])))
        result.append(StepLane("its link", _lasting(moved)))
    return result


def page(work: StepWork, title: str, notes: Sequence[str]) -> str:
    """Return an HTML page with the lanes of a step, and lines of text below."""
    shown = drawn(work)
    rows = lanes(shown)
    if shown.micro_batches < work.micro_batches:
        notes = [*notes, f"drawn with {shown.micro_batches} of {work.micro_batches} micro-batches"]
    kinds = {span.kind for row in rows for span in row.spans}
    legend = [(kind, words) for kind, words in WORDS.items() if kind in kinds]
    return render(TEMPLATE, title=title, notes=notes, rows=rows, legend=legend, seconds=time_step(shown).total)


def _passes(work: StepWork) -> list[list[Span]]:
    """Return, by rank, the forwards and backwards."""
    if work.ranks == 1:
        spans, now = [], 0.0
        for number in range(work.micro_batches):
            for kind, seconds in ((FORWARD, sum(work.forward)), (BACKWARD, sum(work.backward))):
                spans.append(Span(kind, str(number), now, now + seconds))
                now += seconds
        return [spans]
    measured = {(FORWARD, stage): seconds for stage, seconds in enumerate(work.forward)}
    measured |= {(BACKWARD, stage): seconds for stage, seconds in enumerate(work.backward)}
    measured |= {(half, stage): seconds / 2 for half in (INPUT, WEIGHT) for stage, seconds in enumerate(work.backward)}
    table = timetable(work.schedule, work.ranks, len(work.forward), work.micro_batches)
    slots = table.slots(StageTimes(send=work.send, measured=measured))
    return [
        [Span(slot.action.kind, str(slot.action.micro_batch), slot.start, slot.stop) for slot in row] for row in slots
    ]


def _sums(work: StepWork, rank: int, end: float) -> Iterable[Span]:
    """Yield the buckets of a rank's sums, each as soon as its gradients are there and the link is free."""
    buckets = min(work.buckets[rank], MOST_BUCKETS)
    backward = backward_of_rank(work, rank) if work.under_backward else 0.0
    free = 0.0
    for bucket in range(1, buckets + 1):
        start = max(free, end - backward * (1 - bucket / buckets))
        free = start + work.sums[rank] / buckets
        yield Span(SUM, "", start, free)


def _lasting(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.stop > span.start)
