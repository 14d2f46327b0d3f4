"""Draws schedules.svg: the two schedules of docs/overlap.md, serial above and overlapped below.

A drawing of a model, not of a measurement: a matmul of 9 units of time next to a collective of 6, in
4 chunks, on 4 ranks. Run it after a change: python docs/images/draw_schedules.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

MATMUL, COLLECTIVE, RANKS = 9.0, 6.0, 4
WEIGHTS = (1, 2, 2, 1)  # what ops/rows.py gives for 4 chunks
SHARES = [weight / sum(WEIGHTS) for weight in WEIGHTS]

UNIT, LEFT, WIDTH, HEIGHT = 48, 232, 1050, 516
LANE, GAP = 30, 6
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 14px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .title { font-weight: bold; font-size: 16px }
  .lane { text-anchor: end }
  .quiet { fill: #59636e }
  .bar text { fill: #ffffff; text-anchor: middle }
  .matmul rect { fill: #2f6fab }
  .hidden rect { fill: #6b7280 }
  .exposed rect { fill: #c22f3c }
  .bar rect { stroke: #ffffff; stroke-width: 1.5 }
  .axis { stroke: #d0d7de; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
    .bar rect { stroke: #0d1117 }
    .axis { stroke: #3d444d }
  }
"""


@dataclass
class Schedule:
    """Bars of one run: ``(start, stop, label)`` in each of the two lanes."""

    name: str
    matmuls: list[tuple[float, float, str]] = field(default_factory=list)
    collectives: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When both lanes are done."""
        return max(stop for _, stop, _ in self.matmuls + self.collectives)

    def pieces(self) -> list[tuple[float, float, str, str]]:
        """Cut the collectives into what runs under a matmul and what does not: start, stop, label, class."""
        edges = sorted({edge for start, stop, _ in self.matmuls for edge in (start, stop)})
        pieces: list[tuple[float, float, str, str]] = []
        for start, stop, label in self.collectives:
            cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
            for begin, end in pairwise(cuts):
                hidden = any(first <= begin and end <= last for first, last, _ in self.matmuls)
                kind = "hidden" if hidden else "exposed"
                if pieces and pieces[-1][1] == begin and pieces[-1][2:] == (label, kind):
                    begin = pieces.pop()[0]
                pieces.append((begin, end, label, kind))
        return pieces

    @property
    def exposed(self) -> float:
        """Time of collectives that no matmul hides."""
        return sum(stop - start for start, stop, _, kind in self.pieces() if kind == "exposed")


def compute_first() -> list[Schedule]:
    """Matmul, then all-reduce or reduce-scatter: chunk i's collective runs under chunk i + 1's matmul."""
    serial = Schedule("serial", [(0, MATMUL, "")], [(MATMUL, MATMUL + COLLECTIVE, "")])
    overlapped = Schedule("overlapped")
    computed = sent = 0.0
    for index, share in enumerate(SHARES, 1):
        overlapped.matmuls.append((computed, computed + MATMUL * share, str(index)))
        computed += MATMUL * share
        start = max(computed, sent)
        sent = start + COLLECTIVE * share
        overlapped.collectives.append((start, sent, str(index)))
    return [serial, overlapped]


def communicate_first() -> list[Schedule]:
    """All-gather, then matmul: own rows under the first gathers, then each chunk as it arrives."""
    serial = Schedule("serial", [(COLLECTIVE, COLLECTIVE + MATMUL, "")], [(0, COLLECTIVE, "")])
    overlapped = Schedule("overlapped", [(0, MATMUL / RANKS, "own")])
    arrived, computed = 0.0, MATMUL / RANKS
    for index, share in enumerate(SHARES, 1):
        overlapped.collectives.append((arrived, arrived + COLLECTIVE * share, str(index)))
        arrived += COLLECTIVE * share
        start = max(arrived, computed)
        computed = start + MATMUL * share * (RANKS - 1) / RANKS
        overlapped.matmuls.append((start, computed, str(index)))
    return [serial, overlapped]


def bar(start: float, stop: float, label: str, kind: str, y: float) -> str:
    """One box of a lane."""
    x, width = LEFT + start * UNIT, (stop - start) * UNIT
    text = f'<text x="{x + width / 2:g}" y="{y + 20:g}">{label}</text>' if width >= 14 else ""
    return f'<g class="bar {kind}"><rect x="{x:g}" y="{y:g}" width="{width:g}" height="{LANE}" rx="3"/>{text}</g>'


def lanes(schedule: Schedule, y: float) -> list[str]:
    """Two lanes with their names, and how long it took."""
    below, middle = y + LANE + GAP, y + LANE + GAP / 2
    end = LEFT + schedule.end * UNIT
    return [
        f'<text class="title" x="24" y="{middle + 5:g}">{schedule.name}</text>',
        f'<text class="lane" x="{LEFT - 12}" y="{y + 20:g}">matmul</text>',
        f'<text class="lane" x="{LEFT - 12}" y="{below + 20:g}">collective</text>',
        f'<line class="axis" x1="{LEFT}" y1="{middle:g}" x2="{WIDTH - 92}" y2="{middle:g}"/>',
        *(bar(*matmul, "matmul", y) for matmul in schedule.matmuls),
        *(bar(*piece, below) for piece in schedule.pieces()),
        f'<line class="axis" x1="{end:g}" y1="{y - 3:g}" x2="{end:g}" y2="{below + LANE + 3:g}"/>',
        f'<text x="{end + 8:g}" y="{y + 20:g}">{schedule.end:g}</text>',
        f'<text class="quiet" x="{end + 8:g}" y="{below + 20:g}">exposed {schedule.exposed:g}</text>',
    ]


def panel(title: str, schedules: list[Schedule], y: float) -> list[str]:
    """A title and the runs below it."""
    drawn = [f'<text class="title" x="24" y="{y:g}">{title}</text>']
    for index, schedule in enumerate(schedules):
        drawn += lanes(schedule, y + 20 + index * (2 * LANE + GAP + 22))
    return drawn


def legend(y: float) -> list[str]:
    """What the colours mean."""
    drawn, x = [], 24
    for kind, text, width in (
        ("matmul", "matmul", 110),
        ("hidden", "communication under a matmul", 286),
        ("exposed", "exposed communication", 210),
    ):
        drawn.append(f'<g class="bar {kind}"><rect x="{x}" y="{y - 13:g}" width="18" height="16" rx="3"/></g>')
        drawn.append(f'<text x="{x + 26}" y="{y:g}">{text}</text>')
        x += width
    note = f"4 chunks, numbered; matmul {MATMUL:g}, collective {COLLECTIVE:g} units of time; a model, not a measurement"
    return [*drawn, f'<text class="quiet" x="24" y="{y + 26:g}">{note}</text>']


def picture() -> str:
    """The whole file."""
    body = [
        *panel("Compute first: matmul, then all-reduce or reduce-scatter", compute_first(), 36),
        *panel(f"Communicate first: all-gather, then matmul, on {RANKS} ranks", communicate_first(), 258),
        *legend(472),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>Serial and overlapped schedules of a matmul next to a collective</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("schedules.svg").write_text(picture(), encoding="utf-8")
