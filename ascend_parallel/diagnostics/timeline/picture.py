"""What a picture of a timeline shows, as rectangles in ms: one step, two lanes for each rank.

The step shown is the one of median length. Steps begin where the first layer's pass of the last step comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile
from ascend_parallel.diagnostics.timeline.intervals import length, union, within, without
from ascend_parallel.diagnostics.timeline.table import busy, exposed
from ascend_parallel.diagnostics.timeline.trace import collectives, label, tracks

# Of more passes than this a picture shows the last ones: bars would be thinner than a pixel.
MOST_PASSES = 96


@dataclass(frozen=True)
class Bar:
    """Something that ran, from `begin` to `end` in ms; `low` and `high` are its place in the lane, 0 to 1."""

    kind: str
    label: str
    begin: float
    end: float
    low: float = 0.0
    high: float = 1.0


@dataclass
class Lanes:
    """One rank: the passes' names, what it computed or waited for, and what it communicated."""

    rank: int
    passes: list[Bar] = field(default_factory=list)
    compute: list[Bar] = field(default_factory=list)
    comm: list[Bar] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """One step of one run; `share` is the share of the ranks' communication that was exposed, or None without any."""

    title: str
    ranks: list[Lanes]
    milliseconds: float
    share: float | None


def picture(files: Sequence[RankFile], title: str) -> Picture:
    """Draw the step of median length of a run whose clocks are aligned."""
    begin, end, which = _step(files[0].passes)
    shown = {file.rank: [one for one in file.passes if one.begin < end and one.end > begin] for file in files}
    passes = [one for found in shown.values() for one in found]
    first = min((one.begin for one in passes), default=begin)
    last = max((one.end for one in passes), default=end)
    communicated = sum(length(union((s.begin, s.end) for s in one.spans if s.kind == "comm")) for one in passes)
    bare = sum(length(exposed(one)) for one in passes)
    lanes = [_lanes(rank, found, first) for rank, found in shown.items()]
    share = min(bare / communicated, 1.0) if communicated else None
    return Picture(f"{title}{which}", lanes, (last - first) / 1e6, share)


def _step(passes: Sequence[Pass]) -> tuple[int, int, str]:
    """Return begin and end of the step to show, and which it is, in words."""
    if not passes:
        return 0, 0, ""
    steps = _steps(passes)
    lengths = [step[-1].end - step[0].begin for step in steps]
    index = lengths.index(median_low(lengths))
    step = steps[index][-MOST_PASSES:]
    which = f", step {index + 1} of {len(steps)}" if len(steps) > 1 else ""
    return step[0].begin, step[-1].end, which


def _steps(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Cut passes into steps that end as the last one ends; what is before the first whole step belongs to none."""
    ends = [index for index, one in enumerate(passes) if one.key == passes[-1].key]
    steps = [list(passes[a + 1 : b + 1]) for a, b in zip([-1, *ends], ends, strict=False)]
    usual = median_low(len(step) for step in steps)
    whole = [step for step in steps if len(step) == usual and all(one.finished for one in step)]
    return whole or steps


def _lanes(rank: int, passes: Sequence[Pass], zero: int) -> Lanes:
    lanes = Lanes(rank)
    for one in passes:
        name = f"{one.title} {one.direction}".strip()
        lanes.passes.append(_bar("pass", name, one.begin, one.end, zero))
        for span in one.spans:
            if span.kind != "comm":
                lanes.compute.append(_bar(span.kind, label(span), span.begin, span.end, zero))
    both = collectives(passes)
    numbers = tracks([span for _, span in both])
    count = max(numbers, default=0) + 1
    for (one, span), number in zip(both, numbers, strict=True):
        place = (number / count, (number + 1) / count)
        whole, computing = [(span.begin, span.end)], busy(one)
        for kind, pieces in (("hidden", within(whole, computing)), ("exposed", without(whole, computing))):
            lanes.comm += [_bar(kind, label(span), begin, end, zero, *place) for begin, end in pieces]
    return lanes


def _bar(kind: str, name: str, begin: int, end: int, zero: int, low: float = 0.0, high: float = 1.0) -> Bar:
    return Bar(kind, name, (begin - zero) / 1e6, (end - zero) / 1e6, low, high)
