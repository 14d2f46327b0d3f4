"""A plan as a self-contained HTML page: the graph coloured by layout, the collectives, a rank's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascend_parallel.sharding.layout import REPLICATE, text
from ascend_parallel.sharding.planner.gradient_sums import is_sum
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.visualize.advice import Advice
from ascend_parallel.sharding.visualize.explain import NodeRow, node_rows, summary
from ascend_parallel.sharding.visualize.graph_drawing import Point, draw
from ascend_parallel.sharding.visualize.picture import NodeBox, Picture, layout_text, picture, step_texts
from ascend_parallel.sharding.visualize.repeated_layers import repeated
from ascend_parallel.text import size_of
from ascend_parallel.text.folded_rows import FoldedRow, fold
from ascend_parallel.text.templates import render
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes

# Paul Tol's light colours: distinct for the colour-blind, behind black text. WHOLE is for replicated tensors.
WHOLE, OTHERS = "#dddddd", "#f4f4f4"
COLOURS = ("#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00")
CHARACTER, LINE, LONGEST = 6.3, 15.0, 60
TEMPLATE = Path(__file__).with_name("page.html.jinja")
# A row of the table of collectives: when they run, tensor, readers, layouts, steps of forward and of backward.
Row = tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]]


def to_html(
    plan: ShardingPlan,
    advice: Advice | None = None,
    held: RankBytes | None = None,
    facts: Mapping[str, str] | None = None,
    collectives: Sequence[Sequence[str]] = (),
) -> str:
    """Return the page. Of equal repeated layers two are drawn; the others are counted.

    advice
        Is shown below the summary.
    held
        What a rank holds, as in `summary`; None: `ShardingPlan.memory`.
    facts
        Of a training: what is trained and how, by name; stands first.
    collectives
        Of a training: how many run in each micro-batch and in a step, as the cells of a table, heads first. It stands
        in place of the summary's line.
    """
    drawn = picture(plan)
    colours = _colours(plan, drawn)
    memory = held or plan.memory()
    return render(
        TEMPLATE,
        summary=[line for line in summary(plan, held) if not (collectives and line.startswith("collectives "))],
        facts=facts,
        counted=collectives,
        advice=advice,
        legend=_legend(colours),
        drawn=drawn,
        drawing=draw({name: _size(box) for name, box in drawn.boxes.items()}, drawn.arrows),
        colours=colours,
        line_height=LINE,
        cut=_cut,
        path=_path,
        size_of=size_of,
        memory={
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer (Adam)": memory.optimizer,
            "activations": memory.activations,
            "together": memory.total,
        },
        collectives=_collectives(plan, "each micro-batch" if collectives else "forward and backward"),
        operators=_operators(plan),
    )


def _colours(plan: ShardingPlan, drawn: Picture) -> dict[str, str]:
    """Return the colour of each layout: the most frequent have their own, all others share a colour."""
    counts = Counter(box.layout for box in drawn.boxes.values() if box.layout)
    replicated = layout_text(plan, (REPLICATE,) * plan.mesh.ndim)
    colours = {replicated: WHOLE} if replicated in counts else {}
    most = [layout for layout, _ in counts.most_common() if layout != replicated]
    return colours | dict(zip(most, COLOURS, strict=False)) | dict.fromkeys(most[len(COLOURS) :], OTHERS)


def _legend(colours: Mapping[str, str]) -> dict[str, str]:
    own = {layout: colour for layout, colour in colours.items() if colour != OTHERS}
    return {**own, "other layouts": OTHERS} if len(own) < len(colours) else own


def _size(box: NodeBox) -> Point:
    return CHARACTER * 1.12 * max(len(_cut(line)) for line in box.lines) + 14, LINE * len(box.lines) + 8


def _cut(line: str) -> str:
    """Shorten a long line at its beginning: the end of a path says more."""
    return line if len(line) <= LONGEST else f"…{line[1 - LONGEST :]}"


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


def _operators(plan: ShardingPlan) -> list[tuple[NodeRow, FoldedRow, list[str]]]:
    """Return the rows of the nodes, folded as in the text, with the names of the nodes that a row stands for."""
    rows = [row for row in node_rows(plan) if row.operator]
    folded = fold([row.path for row in rows], [row.kind for row in rows])
    return [(rows[each.first], each, [rows[row].where(rows[row].path) for row in each.rows]) for each in folded]


def _collectives(plan: ShardingPlan, usual: str) -> list[tuple[Row, tuple[int, float, float]]]:
    """Return the collectives with their count, bytes and seconds, the most time first.

    Equal collectives of repeated layers share a row. usual: when collectives run that are no sums of gradients, in
    words.
    """
    rows: dict[Row, tuple[int, float, float]] = {}

    def add(row: Row, nbytes: float, seconds: float) -> None:
        count, sent, took = rows.get(row, (0, 0.0, 0.0))
        rows[row] = (count + 1, sent + nbytes, took + seconds)

    for conversion in plan.conversions:
        if conversion.communicates:
            ahead, back = (tuple(step_texts(each, plan)) for each in (conversion.ahead, conversion.back))
            changes = f"{text(conversion.source)} to {text(conversion.target)}"
            tensor, readers = _place(plan, conversion.value.node), _readers(plan, conversion.reader)
            when = "once a step, in buckets" if is_sum(plan, conversion) else usual
            add((when, tensor, readers, changes, ahead, back), conversion.nbytes, conversion.seconds)
    for name, steps in plan.op_collectives.items():
        row = (usual, _place(plan, name), "itself", "-", plan.texts_inside(name), ())
        add(row, sum(step.nbytes for step in steps), sum(step.seconds for step in steps))
    return sorted(rows.items(), key=lambda row: -row[1][2])


def _place(plan: ShardingPlan, name: str) -> str:
    node = plan.graph.nodes[name]
    if node.call is None:
        return repeated(node.source)
    return f"{repeated(node.module)} {node.call.operator}".strip()


def _readers(plan: ShardingPlan, names: str) -> str:
    if not names:
        return "returned"
    return ", ".join(dict.fromkeys(_place(plan, name) for name in names.split(", ")))
