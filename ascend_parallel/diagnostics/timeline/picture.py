"""Compute the picture of a timeline as rectangles in ms: one step, two lanes for each rank.

The picture shows the step of median length. A step ends with a pass of the layer and direction that the record ends
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile
from ascend_parallel.diagnostics.timeline.intervals import length, within, without
from ascend_parallel.diagnostics.timeline.table import busy, communicating, exposed
from ascend_parallel.diagnostics.timeline.trace import collectives, label, tracks

# A picture shows at most this many passes, the last ones: otherwise bars would be thinner than a pixel.
MOST_PASSES = 96

# Colours of bars by kind, in a page and in a PNG. Exposed communication stands out.
COLOURS = {
    "matmul": "#2f6fab",
    "beside": "#7aa7d0",
    "fused": "#7b5ea7",
    "wait": "#e9ecef",
    "clocks": "#e9ecef",
    "hidden": "#9aa3ad",
    "exposed": "#c22f3c",
    "pass": "#ffffff",
}
MEANING = {
    "matmul": "matmul",
    "beside": "sum over ranks",
    "fused": "fused operator",
    "wait": "waits",
    "hidden": "communication beside a computation",
    "exposed": "exposed communication",
}


@dataclass(frozen=True)
class Bar:
    """Work from `begin` to `end` in ms; `low` and `high` are the bar's edges in the lane, 0 to 1."""

    kind: str
    label: str
    begin: float
    end: float
    low: float = 0.0
    high: float = 1.0


@dataclass
class Lanes:
    """The lanes of one rank: names of passes, computation and waits, and communication.

    Waits stand first in `compute`: drawn in this order, computation covers them.
    """

    rank: int
    passes: list[Bar] = field(default_factory=list)
    compute: list[Bar] = field(default_factory=list)
    comm: list[Bar] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """One step of one run; `share` is the exposed share of its communication, or None without communication."""

    title: str
    ranks: list[Lanes]
    milliseconds: float
    share: float | None

    @property
    def headline(self) -> str:
        """The title, the length and the exposed share of the communication."""
        share = "" if self.share is None else f", {self.share:.0%} of the communication exposed"
        return f"{self.title}: {self.milliseconds:.1f} ms{share}"


def picture(files: Sequence[RankFile], title: str) -> Picture:
    """Return the picture of the step of median length; `files` must have aligned clocks."""
    begin, end, which = _step(files[0].passes)
    by_rank = {file.rank: [p for p in file.passes if p.begin < end and p.end > begin] for file in files}
    passes = [layer_pass for of_rank in by_rank.values() for layer_pass in of_rank]
    first = min((layer_pass.begin for layer_pass in passes), default=begin)
    last = max((layer_pass.end for layer_pass in passes), default=end)
    communicated = sum(length(communicating(layer_pass)) for layer_pass in passes)
    bare = sum(length(exposed(layer_pass)) for layer_pass in passes)
    lanes = [_lanes(rank, of_rank, first) for rank, of_rank in by_rank.items()]
    share = min(bare / communicated, 1.0) if communicated else None
    return Picture(f"{title}{which}", lanes, (last - first) / 1e6, share)


def _step(passes: Sequence[Pass]) -> tuple[int, int, str]:
    """Return begin and end of the step to show, and its number in words."""
    if not passes:
        return 0, 0, ""
    steps = _steps(passes)
    lengths = [step[-1].end - step[0].begin for step in steps]
    index = lengths.index(median_low(lengths))
    step = steps[index][-MOST_PASSES:]
    which = f", step {index + 1} of {len(steps)}" if len(steps) > 1 else ""
    return step[0].begin, step[-1].end, which


def _steps(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Split passes into steps: each ends with a pass of the last pass's key; incomplete steps are dropped."""
    ends = [index for index, layer_pass in enumerate(passes) if layer_pass.key == passes[-1].key]
    steps = [list(passes[a + 1 : b + 1]) for a, b in zip([-1, *ends], ends, strict=False)]
    usual = median_low(len(step) for step in steps)
    complete = [step for step in steps if len(step) == usual and all(p.finished for p in step)]
    return complete or steps


def _lanes(rank: int, passes: Sequence[Pass], zero: int) -> Lanes:
    lanes = Lanes(rank)
    for layer_pass in passes:
        name = f"{layer_pass.title} {layer_pass.direction}".strip()
        lanes.passes.append(_bar("pass", name, layer_pass.begin, layer_pass.end, zero))
        for span in layer_pass.spans:
            if span.kind != "comm":
                lanes.compute.append(_bar(span.kind, label(span), span.begin, span.end, zero))
    lanes.compute.sort(key=lambda bar: bar.kind != "wait")
    pairs = collectives(passes)
    numbers = tracks([span for _, span in pairs])
    count = max(numbers, default=0) + 1
    for (layer_pass, span), number in zip(pairs, numbers, strict=True):
        place = (number / count, (number + 1) / count)
        whole, computing = [(span.begin, span.end)], busy(layer_pass)
        for kind, pieces in (("hidden", within(whole, computing)), ("exposed", without(whole, computing))):
            lanes.comm += [_bar(kind, label(span), begin, end, zero, *place) for begin, end in pieces]
    return lanes


def _bar(kind: str, name: str, begin: int, end: int, zero: int, low: float = 0.0, high: float = 1.0) -> Bar:
    return Bar(kind, name, (begin - zero) / 1e6, (end - zero) / 1e6, low, high)
