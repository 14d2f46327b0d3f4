"""A plan as a self-contained HTML page: the graph coloured by layout, the collectives, a rank's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.visualize.explain import size_of, summary, text
from ascend_parallel.sharding.visualize.graph_drawing import Drawing, Place, Point, draw
from ascend_parallel.sharding.visualize.picture import (
    COLLECTIVE,
    FOLDED,
    NodeBox,
    Picture,
    layout_text,
    picture,
    step_texts,
)
from ascend_parallel.sharding.visualize.repeated_layers import repeated

# Paul Tol's light colours: distinct for the colour-blind, behind black text. WHOLE is for replicated tensors.
WHOLE, OTHERS, NONE = "#dddddd", "#f4f4f4", "#ffffff"
COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00")
# A picture wider than its frame shrinks, down to this share of its size.
NARROWEST = 0.7
CHARACTER, LINE, MARGIN, LONGEST = 6.3, 15.0, 8.0, 60
STYLE = """
  body { font: 14px system-ui, 'DejaVu Sans', sans-serif; color: #1f2328; background: #fff; margin: 1.5em }
  h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 1.5em } .quiet { color: #59636e }
  .both { display: flex; gap: 24px; align-items: flex-start; flex-wrap: wrap }
  .scroll { overflow: auto; max-height: 92vh; border: 1px solid #d0d7de; padding: 8px; flex: 3 1 640px }
  .beside { flex: 2 1 420px; overflow-x: auto }
  svg text { font: 11px 'DejaVu Sans Mono', ui-monospace, monospace; fill: #1f2328 }
  svg .line0 { font-weight: bold } .arrow { fill: none; stroke: #8c959f; stroke-width: 1.2 }
  .thick { stroke: #a8123e; stroke-width: 3 } .box rect { stroke: #59636e; stroke-width: 1 }
  .configured rect { stroke: #1f2328; stroke-width: 3 } .collective rect { stroke: #a8123e; stroke-width: 2 }
  .collective text { fill: #a8123e } .folded rect { stroke-dasharray: 5 4 }
  .key { white-space: nowrap; margin-right: 16px; display: inline-block }
  .key i { display: inline-block; width: 16px; height: 12px; margin-right: 5px; border: 1px solid #59636e }
  table { border-collapse: collapse; font-size: 13px }
  th, td { padding: 3px 8px; border-bottom: 1px solid #d0d7de; text-align: left; vertical-align: top }
  .number { text-align: right; white-space: nowrap }
"""


def to_html(plan: ShardingPlan) -> str:
    """Return the page. Of equal repeated layers two are drawn; the others are counted."""
    drawn = picture(plan)
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in summary(plan))
    colours = _colours(plan, drawn)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Sharding plan</title><style>{STYLE}</style></head><body>
<h1>Sharding plan</h1>
{paragraphs}
<p class="quiet">R: replicated; R*: replicated, with a gradient that is a partial sum; S(d): sharded along dimension d;
P: a partial sum or average. Point at a box or an arrow for more.</p>
<p>{_legend(colours)}</p>
<div class="both"><div class="scroll">{_svg(drawn, colours)}</div><div class="beside">
<h2>Memory of a rank</h2>
{_memory(plan)}
<h2>Collectives of a step, by time</h2>
{_collectives(plan)}
</div></div>
</body></html>
"""


def _colours(plan: ShardingPlan, drawn: Picture) -> dict[str, str]:
    """Return the colour of each layout: the most frequent have their own, all others share a colour."""
    counts = Counter(box.layout for box in drawn.boxes.values() if box.layout)
    replicated = layout_text(plan, (REPLICATE,) * plan.mesh.ndim)
    colours = {replicated: WHOLE} if replicated in counts else {}
    most = [layout for layout, _ in counts.most_common() if layout != replicated]
    return colours | dict(zip(most, COLOURS, strict=False)) | dict.fromkeys(most[len(COLOURS) :], OTHERS)


def _legend(colours: Mapping[str, str]) -> str:
    own = {layout: colour for layout, colour in colours.items() if colour != OTHERS}
    shown = {**own, "other layouts": OTHERS} if len(own) < len(colours) else own
    keys = [f'<i style="background:{colour}"></i>{escape(layout)}' for layout, colour in shown.items()]
    keys.append('<i style="background:#fff;border:3px solid #1f2328;height:8px;width:12px"></i>configured')
    keys.append('<i style="background:#fff;border:2px solid #a8123e;height:10px;width:14px"></i>collective')
    return "".join(f'<span class="key">{key}</span> ' for key in keys)


def _svg(drawn: Picture, colours: Mapping[str, str]) -> str:
    sizes = {name: _size(box) for name, box in drawn.boxes.items()}
    drawing = draw(sizes, drawn.arrows)
    arrows = "".join(_arrow(drawn, drawing, arrow, hint) for arrow, hint in drawn.arrows.items())
    boxes = "".join(_box(box, drawing.places[name], colours) for name, box in drawn.boxes.items())
    width, height = drawing.width + 2 * MARGIN, drawing.height + 2 * MARGIN
    style = f"width:100%;min-width:{NARROWEST * width:.0f}px;max-width:{width:.0f}px"
    view = f"{-MARGIN:.0f} {-MARGIN:.0f} {width:.0f} {height:.0f}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" style="{style}" viewBox="{view}">{_heads()}{arrows}{boxes}</svg>'


def _heads() -> str:
    head = (
        '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" {1}><path d="{2}"/></marker>'
    )
    shape = "M0 0L8 4L0 8z"
    thin = head.format("head", 'markerWidth="8" markerHeight="8" orient="auto" fill="#8c959f"', shape)
    thick = head.format("thick", 'markerWidth="13" markerHeight="13" orient="auto" fill="#a8123e"', shape)
    return f"<defs>{thin}{thick}</defs>"


def _size(box: NodeBox) -> Point:
    return CHARACTER * 1.12 * max(len(_cut(line)) for line in box.lines) + 14, LINE * len(box.lines) + 8


def _cut(line: str) -> str:
    """Shorten a long line at its beginning: the end of a path says more."""
    return line if len(line) <= LONGEST else f"…{line[1 - LONGEST :]}"


def _box(box: NodeBox, place: Place, colours: Mapping[str, str]) -> str:
    middle, first = place.x + place.width / 2, place.y + 15
    round_ends = ' rx="9"' if box.kind in (COLLECTIVE, FOLDED) else ""
    lines = "".join(
        f'<text class="line{index}" x="{middle:.1f}" y="{first + LINE * index:.1f}" text-anchor="middle">'
        f"{escape(_cut(line))}</text>"
        for index, line in enumerate(box.lines)
    )
    return (
        f'<g class="box {box.kind}{" configured" if box.configured else ""}"><title>{escape(box.hint)}</title>'
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}"{round_ends} '
        f'fill="{colours.get(box.layout, NONE)}"/>{lines}</g>\n'
    )


def _arrow(drawn: Picture, drawing: Drawing, arrow: tuple[str, str], hint: str) -> str:
    thick = drawn.is_thick(arrow)
    ends = [drawn.boxes[end].hint for end in arrow if drawn.boxes[end].kind == COLLECTIVE]
    title = "\n".join([hint, *ends])
    return (
        f'<path class="arrow{" thick" if thick else ""}" marker-end="url(#{"thick" if thick else "head"})" '
        f'd="{_path(drawing.arrows[arrow])}"><title>{escape(title)}</title></path>\n'
    )


def _path(points: Sequence[Point]) -> str:
    """Return the SVG path of an arrow: curves that start and end vertically, and lines through the rows."""
    (x, y), commands = points[0], [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for index, (next_x, next_y) in enumerate(points[1:]):
        if index % 2:
            commands.append(f"L{next_x:.1f} {next_y:.1f}")
        else:
            half = (y + next_y) / 2
            commands.append(f"C{x:.1f} {half:.1f} {next_x:.1f} {half:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return "".join(commands)


def _memory(plan: ShardingPlan) -> str:
    memory = plan.memory()
    rows = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer (Adam)": memory.optimizer,
        "activations": memory.activations,
        "together": memory.total,
    }
    lines = (f'<tr><td>{name}</td><td class="number">{size_of(held)}</td></tr>' for name, held in rows.items())
    return f"<table>{''.join(lines)}</table>"


def _collectives(plan: ShardingPlan) -> str:
    """Return a table of the collectives, the most time first; equal collectives of repeated layers share a row."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for conversion in plan.conversions:
        if conversion.communicates:
            both = (conversion.ahead, conversion.back)
            steps = ("<br>".join(map(escape, step_texts(each, plan))) or "-" for each in both)
            changes = f"{text(conversion.source)} to {text(conversion.target)}"
            key = (_place(plan, conversion.value.node), _readers(plan, conversion.reader), changes, *steps)
            count, nbytes, seconds = rows.get(key, [0, 0.0, 0.0])
            rows[key] = [count + 1, nbytes + conversion.nbytes, seconds + conversion.seconds]
    for name, own_steps in plan.op_collectives.items():
        lines = "<br>".join(escape(step.text(plan.mesh.dim_names[step.mesh_dim])) for step in own_steps)
        key = (_place(plan, name), "itself", "-", lines, "-")
        count, nbytes, seconds = rows.get(key, [0, 0.0, 0.0])
        sent, took = sum(step.nbytes for step in own_steps), sum(step.seconds for step in own_steps)
        rows[key] = [count + 1, nbytes + sent, seconds + took]
    if not rows:
        return "<p>none</p>"
    return _collectives_table(rows)


def _collectives_table(rows: Mapping[tuple[str, ...], list[float]]) -> str:
    lines = []
    for (tensor, readers, changes, ahead, back), (count, nbytes, seconds) in sorted(rows.items(), key=_by_time):
        numbers = (f"{1e3 * seconds:.3f}", f"{count:.0f}", size_of(nbytes))
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        cells += "".join(f"<td>{escape(cell).replace('.', '.<wbr>')}</td>" for cell in (tensor, readers, changes))
        lines.append(f"<tr>{cells}<td>{ahead}</td><td>{back}</td></tr>\n")
    heads = ("ms", "times", "sent by a rank", "tensor of", "read by", "layout", "forward", "backward")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>\n{''.join(lines)}</table>"


def _by_time(row: tuple[tuple[str, ...], list[float]]) -> float:
    return -row[1][2]


def _place(plan: ShardingPlan, name: str) -> str:
    node = plan.graph.nodes[name]
    if node.call is None:
        return repeated(node.source)
    return f"{repeated(node.module)} {node.call.name.split('.')[1]}".strip()


def _readers(plan: ShardingPlan, names: str) -> str:
    if not names:
        return "returned"
    return ", ".join(dict.fromkeys(_place(plan, name) for name in names.split(", ")))
