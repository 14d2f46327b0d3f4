"""Draw pictures as SVG in a page; positions on the time axis are percentages, so that a wider SVG is a zoom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_parallel.diagnostics.timeline.markup import Markup, fill, joined
from ascend_parallel.diagnostics.timeline.picture import Bar, Lanes, Picture

NAME, LANE, GAP, TITLE, AXIS = 15, 28, 4, 26, 22
BLOCK = NAME + 2 * (LANE + GAP) + 14

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


def height(pictures: Sequence[Picture]) -> int:
    """Return the height of all pictures together, in pixels."""
    return sum(TITLE + BLOCK * len(picture.ranks) for picture in pictures) + AXIS


def bars(pictures: Sequence[Picture]) -> Markup:
    """Return the SVG of all pictures, with a common time scale."""
    total = max((picture.milliseconds for picture in pictures), default=0.0) or 1.0
    tall = height(pictures)
    head = '<svg class="time" xmlns="http://www.w3.org/2000/svg" width="100%" height="$tall" role="img">'
    parts = [fill(head, tall=tall)]
    parts += _axis(total, tall)
    top = 0
    for picture in pictures:
        top += TITLE
        for lanes in picture.ranks:
            parts += _rank(lanes, top, total)
            top += BLOCK
    return joined([*parts, fill("</svg>")], "\n")


def names(pictures: Sequence[Picture]) -> Markup:
    """Return the SVG of the lanes' names, which the page shows beside the bars."""
    head = '<svg class="names" xmlns="http://www.w3.org/2000/svg" width="100%" height="$tall">'
    parts = [fill(head, tall=height(pictures))]
    top = 0
    for picture in pictures:
        parts.append(fill('<text class="title" x="0" y="$y">$title</text>', y=top + 18, title=headline(picture)))
        top += TITLE
        for lanes in picture.ranks:
            for row, lane in enumerate(("compute", "communication")):
                y = top + NAME + row * (LANE + GAP) + LANE // 2 + 5
                parts.append(fill('<text x="0" y="$y">rank $rank $lane</text>', y=y, rank=lanes.rank, lane=lane))
            top += BLOCK
    return joined([*parts, fill("</svg>")], "\n")


def headline(picture: Picture) -> str:
    """Return a picture's headline: its title, its length and the exposed share of its communication."""
    share = "" if picture.share is None else f", {picture.share:.0%} of the communication exposed"
    return f"{picture.title}: {picture.milliseconds:.1f} ms{share}"


def ticks(total: float) -> list[float]:
    """Return about a dozen round times from 0 to `total` ms."""
    step = next(step * 10.0**power for power in range(-4, 16) for step in (1, 2, 5) if total <= 14 * step * 10.0**power)
    return [number * step for number in range(int(total / step) + 1)]


def _axis(total: float, tall: int) -> Iterator[Markup]:
    for time in ticks(total):
        x = f"{100 * time / total:.4f}%"
        yield fill('<line class="tick" x1="$x" x2="$x" y1="0" y2="$y"/>', x=x, y=tall - AXIS)
        yield fill('<text class="quiet" x="$x" y="$y" dx="3">$time ms</text>', x=x, y=tall - 6, time=f"{time:g}")


def _rank(lanes: Lanes, top: int, total: float) -> Iterator[Markup]:
    for bar in lanes.passes:
        yield _bar(bar, top, NAME, total)
    for row, lane in enumerate((lanes.compute, lanes.comm)):
        y = top + NAME + row * (LANE + GAP)
        yield fill('<rect class="lane" x="0" y="$y" width="100%" height="$tall"/>', y=y, tall=LANE)
        # Draw waits first, so that computation covers them.
        for bar in sorted(lane, key=lambda bar: bar.kind != "wait"):
            yield _bar(bar, y + bar.low * LANE, (bar.high - bar.low) * LANE, total)


def _bar(bar: Bar, y: float, tall: float, total: float) -> Markup:
    """Return one bar as a nested SVG, which clips the bar's label."""
    x, width = 100 * bar.begin / total, 100 * (bar.end - bar.begin) / total
    about = f"{bar.label}{'' if bar.kind in bar.label else f' ({bar.kind})'}: {bar.end - bar.begin:.3f} ms"
    short = bar.label.rpartition(".")[2] if bar.kind == "pass" else bar.label
    label = '<text x="3" y="$middle">$short</text>'
    return fill(
        '<svg class="bar $kind" x="$x" y="$y" width="$width" height="$tall"><title>$about, from $begin ms</title>'
        '<rect width="100%" height="100%"/>$text</svg>',
        kind=bar.kind,
        x=f"{x:.4f}%",
        y=f"{y:g}",
        width=f"{width:.4f}%",
        tall=f"{tall:g}",
        about=about,
        begin=f"{bar.begin:.3f}",
        text="" if bar.kind == "wait" else fill(label, middle=f"{tall / 2 + 4:g}", short=short),
    )
