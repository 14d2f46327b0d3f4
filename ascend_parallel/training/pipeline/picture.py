"""A simulated schedule as text and as a picture: a row for each rank, time to the right, bubbles shaded."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ascend_parallel.training.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Simulated,
    closed_bubble,
)

WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, inputs", WEIGHT: "backward, weights"}
LEFT, TOP, LANE, GAP, WIDTH = 70, 64, 30, 6, 1050
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .title { font-weight: bold; font-size: 15px }
  .slot text { fill: #ffffff; text-anchor: middle; font-size: 11px }
  .slot rect { stroke: #ffffff; stroke-width: 1 }
  .F rect { fill: #2f6fab }
  .B rect { fill: #2e7d4f }
  .I rect { fill: #2e7d4f }
  .W rect { fill: #8a6d1f }
  .F.later rect { fill: #5b93c7 }
  .B.later rect, .I.later rect { fill: #5a9c74 }
  .W.later rect { fill: #b0924a }
  .shade { fill: url(#bubble) }
  .line { stroke: #b4bcc6; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #e6edf3 }
    .slot rect { stroke: #0d1117 }
    .line { stroke: #59636e }
  }
"""


def text(simulated: Simulated) -> str:
    """Return the schedule as text: "F3" is the forward of micro-batch 3, dots are bubbles.

    If ranks have several stages, a letter tells the stage: a for a rank's first, b for its second.
    """
    unit = min(slot.stop - slot.start for slots in simulated.slots for slot in slots)
    cells = round(simulated.seconds / unit)
    labels = [[_label(simulated, rank, slot.action) for slot in slots] for rank, slots in enumerate(simulated.slots)]
    width = max(len(label) for row in labels for label in row) + 1
    rows = []
    for rank, slots in enumerate(simulated.slots):
        line = [".".ljust(width)] * cells
        for slot, label in zip(slots, labels[rank], strict=True):
            first, last = round(slot.start / unit), round(slot.stop / unit)
            filled = label.ljust((last - first) * width - 1, "-") + " "
            for place in range(first, last):
                line[place] = filled[(place - first) * width :][:width]
        rows.append(f"rank {rank}  " + "".join(line).rstrip())
    return "\n".join((title(simulated), _held(simulated), *rows))


def title(simulated: Simulated) -> str:
    """Return the schedule's name, its numbers, and its bubbles: simulated and by the published formula."""
    ranks = len(simulated.slots)
    closed = closed_bubble(simulated.name, ranks, simulated.stages, simulated.micro_batches)
    formula = "" if closed is None else f", by the formula {closed:.1%}"
    numbers = f"{simulated.stages} stages on {ranks} ranks, {simulated.micro_batches} micro-batches"
    return f"{simulated.name}: {numbers}; bubbles {simulated.bubble:.1%}{formula}"


def _held(simulated: Simulated) -> str:
    live = ", ".join(f"{count:g}" for count in simulated.live)
    return f"ranks hold the activations of at most {live} micro-batches"


def svg(*schedules: Simulated) -> str:
    """Return a picture of schedules, below each other on the same time scale."""
    scale = (WIDTH - LEFT - 24) / max(schedule.seconds for schedule in schedules)
    parts: list[str] = []
    top = 0.0
    for schedule in schedules:
        parts += _card(schedule, top, scale)
        top += _height(schedule) + 10
    return "\n".join((_head(top, schedules), *parts, "</svg>\n"))


def _head(height: float, schedules: tuple[Simulated, ...]) -> str:
    names = escape(", ".join(schedule.name for schedule in schedules))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">\n'
        f"<title>Pipeline schedules: {names}</title>\n<style>{STYLE}</style>\n"
        '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line class="line" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )


def _height(simulated: Simulated) -> float:
    return TOP + len(simulated.slots) * (LANE + GAP) + 12


def _card(simulated: Simulated, top: float, scale: float) -> Iterator[str]:
    height = _height(simulated) - 1
    yield f'<rect class="card" x="0.5" y="{top + 0.5:g}" width="{WIDTH - 1}" height="{height:g}" rx="8"/>'
    yield f'<text class="title" x="16" y="{top + 26:g}">{escape(title(simulated))}</text>'
    yield from _legend(simulated, top + 42)
    for rank, slots in enumerate(simulated.slots):
        y = top + TOP + rank * (LANE + GAP)
        yield f'<text x="16" y="{y + 20:g}">rank {rank}</text>'
        yield (f'<rect class="shade" x="{LEFT}" y="{y:g}" width="{simulated.seconds * scale:.1f}" height="{LANE}"/>')
        for slot in slots:
            x, width = LEFT + slot.start * scale, (slot.stop - slot.start) * scale
            later = " later" if _which(simulated, rank, slot.action.stage) else ""
            label = slot.action.micro_batch if width > 12 else ""
            yield (
                f'<g class="slot {slot.action.kind}{later}"><rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" '
                f'height="{LANE}" rx="2"/><text x="{x + width / 2:.1f}" y="{y + 19:g}">{label}</text></g>'
            )


def _legend(simulated: Simulated, y: float) -> Iterator[str]:
    kinds = [kind for kind in WORDS if any(slot.action.kind == kind for slot in simulated.slots[0])]
    x = LEFT
    for kind, word in [*((kind, WORDS[kind]) for kind in kinds), ("", "bubble")]:
        square = f'<rect x="{x}" y="{y - 8:g}" width="12" height="12"'
        yield f'<g class="slot {kind}">{square}/></g>' if kind else f'{square} class="shade"/>'
        yield f'<text x="{x + 18}" y="{y + 3:g}">{word}</text>'
        x += 40 + 8 * len(word)
    yield f'<text x="{x}" y="{y + 3:g}">{_held(simulated)}</text>'


def _label(simulated: Simulated, rank: int, action: Action) -> str:
    several = simulated.stages > len(simulated.slots)
    which = chr(ord("a") + _which(simulated, rank, action.stage)) if several else ""
    return f"{action.kind}{action.micro_batch}{which}"


def _which(simulated: Simulated, rank: int, stage: int) -> int:
    """Return which of its rank's stages a stage is, from 0."""
    return sorted({slot.action.stage for slot in simulated.slots[rank]}).index(stage)
