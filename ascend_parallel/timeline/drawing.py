"""A picture as SVG inside a page: places along the time axis are percentages, so that a wider SVG is a closer look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ascend_parallel.timeline.picture import Bar, Lanes, Picture

NAME, LANE, GAP, TITLE, AXIS = 15, 28, 4, 26, 22
BLOCK = NAME + 2 * (LANE + GAP) + 14

# Colours of bars by kind, in a page and in a PNG. Exposed communication is the one that stands out.
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


def height(pictures: Sequence[Picture]) -> int:
    """Return the height of all pictures, one under the other, in pixels."""
    return sum(TITLE + BLOCK * len(one.ranks) for one in pictures) + AXIS


def bars(pictures: Sequence[Picture]) -> str:
    """Return the SVG of all pictures on one scale of time."""
    total = max((one.milliseconds for one in pictures), default=0.0) or 1.0
    tall = height(pictures)
    parts = [f'<svg class="time" xmlns="http://www.w3.org/2000/svg" width="100%" height="{tall}" role="img">']
    parts += _axis(total, tall)
    top = 0
    for one in pictures:
        top += TITLE
        for lanes in one.ranks:
            parts += _rank(lanes, top, total)
            top += BLOCK
    return "\n".join([*parts, "</svg>"])


def names(pictures: Sequence[Picture]) -> str:
    """Return the SVG of the lanes' names, which stands beside that of the bars."""
    parts = [f'<svg class="names" xmlns="http://www.w3.org/2000/svg" width="100%" height="{height(pictures)}">']
    top = 0
    for one in pictures:
        parts.append(f'<text class="title" x="0" y="{top + 18}">{escape(headline(one))}</text>')
        top += TITLE
        for lanes in one.ranks:
            for row, lane in enumerate(("compute", "communication")):
                y = top + NAME + row * (LANE + GAP) + LANE // 2 + 5
                parts.append(f'<text x="0" y="{y}">rank {lanes.rank} {lane}</text>')
            top += BLOCK
    return "\n".join([*parts, "</svg>"])


def headline(one: Picture) -> str:
    """Say in a line what a picture shows."""
    share = "" if one.share is None else f", {one.share:.0%} of the communication exposed"
    return f"{one.title}: {one.milliseconds:.1f} ms{share}"


def ticks(total: float) -> list[float]:
    """Return round times from 0 to `total` ms, about a dozen."""
    step = next(step * 10.0**power for power in range(-4, 8) for step in (1, 2, 5) if total <= 14 * step * 10.0**power)
    return [number * step for number in range(int(total / step) + 1)]


def _axis(total: float, tall: int) -> Iterator[str]:
    for time in ticks(total):
        x = f"{100 * time / total:.4f}%"
        yield f'<line class="tick" x1="{x}" x2="{x}" y1="0" y2="{tall - AXIS}"/>'
        yield f'<text class="quiet" x="{x}" y="{tall - 6}" dx="3">{time:g} ms</text>'


def _rank(lanes: Lanes, top: int, total: float) -> Iterator[str]:
    for bar in lanes.passes:
        yield _bar(bar, top, NAME, total)
    for row, found in enumerate((lanes.compute, lanes.comm)):
        y = top + NAME + row * (LANE + GAP)
        yield f'<rect class="lane" x="0" y="{y}" width="100%" height="{LANE}"/>'
        # What waits goes below what is computed meanwhile.
        for bar in sorted(found, key=lambda bar: bar.kind != "wait"):
            yield _bar(bar, y + bar.low * LANE, (bar.high - bar.low) * LANE, total)


def _bar(bar: Bar, y: float, tall: float, total: float) -> str:
    """One bar: an SVG of its own, which clips its label."""
    x, width = 100 * bar.begin / total, 100 * (bar.end - bar.begin) / total
    about = f"{bar.label}{'' if bar.kind in bar.label else f' ({bar.kind})'}: {bar.end - bar.begin:.3f} ms"
    place = f'x="{x:.4f}%" y="{y:g}" width="{width:.4f}%" height="{tall:g}"'
    short = bar.label.rpartition(".")[2] if bar.kind == "pass" else bar.label
    shown = "" if bar.kind == "wait" else f'<text x="3" y="{tall / 2 + 4:g}">{escape(short)}</text>'
    title = f"<title>{escape(about)}, from {bar.begin:.3f} ms</title>"
    return f'<svg class="bar {bar.kind}" {place}>{title}<rect width="100%" height="100%"/>{shown}</svg>'
