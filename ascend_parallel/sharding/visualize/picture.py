"""The content of a plan's picture: boxes for operators and collectives, and arrows from tensors to their readers.

Weights are lines in the boxes of their readers. Of equal repeated layers the first two are shown; a box stands for the
layers after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ascend_parallel.sharding.graph import BUFFER, CALL, CONSTANT, INPUT, PARAMETER, Node, Value
from ascend_parallel.sharding.layout import Layout, text
from ascend_parallel.sharding.planner.operator_strategy import where
from ascend_parallel.sharding.planner.sharding_plan import Conversion, ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import Redistribution
from ascend_parallel.sharding.visualize.repeated_layers import Fold, folded

OPERATOR, GIVEN, COLLECTIVE, FOLDED, RETURNED = "operator", "given", "collective", "folded", "returned"
END = "returned to the user"


@dataclass
class NodeBox:
    """A box with lines of text, and a hint that the page shows under the pointer.

    layout
        The layout of the operator's outputs as text; "" for other boxes.
    """

    kind: str
    lines: list[str]
    hint: str
    layout: str = ""
    configured: bool = False


@dataclass
class Picture:
    """Boxes by name, and arrows between boxes with their hints."""

    boxes: dict[str, NodeBox] = field(default_factory=dict)
    arrows: dict[tuple[str, str], str] = field(default_factory=dict)

    def is_thick(self, arrow: tuple[str, str]) -> bool:
        """Tell whether to draw an arrow thick: the arrow leads into or out of a collective."""
        return any(self.boxes[end].kind == COLLECTIVE for end in arrow)


def picture(plan: ShardingPlan) -> Picture:
    """Return the boxes and arrows of a plan."""
    return _Painter(plan).paint()


def layout_text(plan: ShardingPlan, layout: Layout) -> str:
    """Return a layout with the names of the mesh dimensions, such as "dp S(0), mp R"."""
    return ", ".join(f"{name} {state}" for name, state in zip(plan.mesh.dim_names, layout, strict=True))


def step_texts(redistribution: Redistribution | None, plan: ShardingPlan) -> list[str]:
    """Return the steps that communicate, as text."""
    steps = redistribution.steps if redistribution is not None else ()
    return [step.text(plan.mesh.dim_names[step.mesh_dim]) for step in steps if step.nbytes]


def conversion_texts(conversion: Conversion, plan: ShardingPlan) -> list[str]:
    """Return a line for each collective of a conversion: first those of forward, then those of backward."""
    return [*step_texts(conversion.ahead, plan), *(f"backward: {step}" for step in step_texts(conversion.back, plan))]


class _Painter:
    """Builds the picture of a plan."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._picture = Picture()
        folds = folded(plan)
        self._folds = {f"fold {index}": fold for index, fold in enumerate(folds)}
        self._shown = {name: name for name, node in plan.graph.nodes.items() if node.kind in (CALL, INPUT)}
        for title, fold in self._folds.items():
            self._shown |= dict.fromkeys(fold.nodes, title)
        self._conversions: dict[Value, dict[tuple[Layout, Layout], Conversion]] = {}
        for conversion in plan.conversions:
            self._conversions.setdefault(conversion.value, {})[conversion.source, conversion.target] = conversion
        self._returned = set(plan.graph.returned)

    def paint(self) -> Picture:
        for name, title in self._shown.items():
            if title not in self._picture.boxes:
                fold = self._folds.get(title)
                self._picture.boxes[title] = self._box(self._plan.graph.nodes[name]) if fold is None else _box_of(fold)
        self._picture.boxes[END] = NodeBox(RETURNED, ["returned"], "the model's outputs, replicated on every rank")
        for value, readers in self._plan.graph.readers().items():
            kind = self._plan.graph.nodes[value.node].kind
            if kind == PARAMETER:
                self._add_weight(value, [name for name, _ in readers])
            elif kind not in (BUFFER, CONSTANT):
                self._add_arrows(value, [(name, self._plan.inputs[name][index]) for name, index in readers])
        return self._picture

    def _box(self, node: Node) -> NodeBox:
        plan = self._plan
        outputs = " | ".join(dict.fromkeys(layout_text(plan, layout) for layout in plan.output_layouts(node)))
        shapes = ", ".join(f"{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')}" for meta in node.outputs)
        if node.kind != CALL:
            return NodeBox(GIVEN, [where(node), outputs], shapes, outputs)
        title = where(node)
        reads = [f"reads {layout_text(plan, layout)}" for layout in plan.inputs[node.name]]
        itself = [f"itself: {text}" for text in plan.texts_inside(node.name)]
        hint = "\n".join([title, *reads, f"gives {outputs}", shapes, plan.why(node), *itself])
        return NodeBox(OPERATOR, [title, outputs], hint, outputs, node.name in plan.configured)

    def _add_weight(self, value: Value, readers: Sequence[str]) -> None:
        """Write a weight, its layout and its collectives into the boxes of its readers."""
        plan = self._plan
        source = plan.graph.nodes[value.node].source
        for name in dict.fromkeys(readers):
            box = self._picture.boxes[self._shown[name]]
            if box.kind != OPERATOR:
                continue
            box.lines.append(f"{source.rpartition('.')[2]}: {layout_text(plan, plan.layouts[value])}")
            conversions = self._conversions.get(value, {}).values()
            steps = [line for conversion in conversions for line in conversion_texts(conversion, plan)]
            box.lines += steps
            box.hint += "\n" + "\n".join([f"{source} {list(plan.graph.meta(value).shape)}", *steps])

    def _add_arrows(self, value: Value, readers: Sequence[tuple[str, Layout]]) -> None:
        """Draw the arrows from a tensor to its readers, through its collectives."""
        plan, start = self._plan, self._shown[value.node]
        source, before = start, plan.layouts[value]
        ends = dict.fromkeys((self._shown[name], layout) for name, layout in readers if self._shown[name] != start)
        if value in plan.shared_layouts and ends:
            shared = plan.shared_layouts[value]
            source, before = self._through(value, source, before, shared), shared
        for end, layout in ends:
            self._picture.arrows[self._through(value, source, before, layout), end] = self._hint(value, before, layout)
        if value in self._returned:
            returned = plan.returned_layout(value)
            last = self._through(value, start, plan.layouts[value], returned)
            self._picture.arrows[last, END] = self._hint(value, plan.layouts[value], returned)

    def _through(self, value: Value, source: str, before: Layout, after: Layout) -> str:
        """Draw the box of a collective; return its name, or `source` if no collective runs."""
        conversion = self._conversions.get(value, {}).get((before, after))
        if conversion is None or not conversion.communicates:
            return source
        title = f"collective {value.node} {value.index} {text(before)} to {text(after)}"
        plan = self._plan
        names = plan.mesh.dim_names
        changes = f"{layout_text(plan, before)} to {layout_text(plan, after)}"
        hint = [changes, f"forward: {conversion.ahead.text(names)}"]
        hint += [f"backward: {conversion.back.text(names)}"] if conversion.back is not None else []
        self._picture.boxes[title] = NodeBox(COLLECTIVE, conversion_texts(conversion, plan), "\n".join(hint))
        self._picture.arrows[source, title] = self._hint(value, before, before)
        return title

    def _hint(self, value: Value, before: Layout, after: Layout) -> str:
        """Return the hint of an arrow: the tensor, its shape, its layout and the layout of the reader."""
        meta, plan = self._plan.graph.meta(value), self._plan
        change = "" if before == after else f", read as {layout_text(plan, after)}"
        return f"{value.node} {list(meta.shape)}: {layout_text(plan, before)}{change}"


def _box_of(fold: Fold) -> NodeBox:
    layers = fold.layers[0] if len(fold.layers) == 1 else f"{fold.layers[0]} to {fold.layers[-1]}"
    layouts = "same layouts" if not fold.others else f"{fold.others} with other layouts"
    lines = [f"{layers}: {len(fold.layers)} more like {fold.like}", layouts, *fold.collectives]
    return NodeBox(FOLDED, lines, "left out of the picture; the table lists their collectives")
