"""Compute the picture of a timeline as rectangles in ms, one step, two lanes for each rank; draw it as a PNG.

The picture shows the step of median length. A step ends with a pass of the layer and direction that the record ends
with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from ascend_parallel.diagnostics.intervals import length, within, without
from ascend_parallel.diagnostics.timeline.files import Pass, RankFile, TimelineError
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
    "beside": "other computation",
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
class RankLanes:
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
    ranks: list[RankLanes]
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


def _lanes(rank: int, passes: Sequence[Pass], zero: int) -> RankLanes:
    lanes = RankLanes(rank)
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


WIDTH, LANE, DPI = 10.0, 0.32, 150  # inches


def draw(pictures: Sequence[Picture], path: Path) -> None:
    """Write the pictures in a column with a common time scale; raises `TimelineError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise TimelineError(
            f"{path.name} needs matplotlib, which is not installed: pip install matplotlib, or give --no-png"
        ) from error
    sizes = [len(picture.ranks) for picture in pictures]
    figure = Figure(figsize=(WIDTH, 2 * LANE * sum(sizes) + 0.45 * len(sizes) + 0.8), layout="constrained")
    plots = figure.subplots(len(pictures), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for plot, picture in zip(plots, pictures, strict=True):
        _panel(plot, picture)
    plots[-1].set_xlabel("ms")
    kinds = {bar.kind for picture in pictures for lanes in picture.ranks for bar in (*lanes.compute, *lanes.comm)}
    legend = [
        Patch(facecolor=COLOURS[kind], edgecolor="#d0d7de", label=words)
        for kind, words in MEANING.items()
        if kind in kinds
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(new, dpi=DPI, format="png")
    new.replace(path)


def _panel(plot: Any, picture: Picture) -> None:
    plot.set_title(picture.headline, loc="left", fontsize=10)
    plot.set_yticks([-row for row in range(2 * len(picture.ranks))])
    plot.set_yticklabels(
        [f"rank {lanes.rank} {lane}" for lanes in picture.ranks for lane in ("compute", "comm.")], fontsize=8
    )
    plot.set_ylim(-2 * len(picture.ranks) + 0.5, 0.5)
    plot.tick_params(axis="y", length=0)
    plot.grid(axis="x", color="#d0d7de", linewidth=0.5)
    plot.set_axisbelow(True)
    for side in ("top", "right", "left"):
        plot.spines[side].set_visible(False)
    for number, lanes in enumerate(picture.ranks):
        _rank(plot, lanes, -2 * number)


def _rank(plot: Any, lanes: RankLanes, row: int) -> None:
    for place, bars in ((row, lanes.compute), (row - 1, lanes.comm)):
        for bar in bars:
            low, high = place + 0.4 - 0.8 * bar.high, place + 0.4 - 0.8 * bar.low
            width = bar.end - bar.begin
            edge = {"edgecolor": "white", "linewidth": 0.4}
            plot.broken_barh([(bar.begin, width)], (low, high - low), facecolor=COLOURS[bar.kind], **edge)
