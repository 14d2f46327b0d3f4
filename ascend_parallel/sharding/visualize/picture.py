"""What a picture of a plan shows: its operators as boxes, its collectives as boxes between them, and who reads whom.

Weights are lines in the boxes of their readers. Of repeated layers that are alike the first two are shown, and one box
stands for those that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import BUFFER, CALL, CONSTANT, INPUT, PARAMETER, Node, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.sharding.planner.sharding_plan import Conversion, ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import Redistribution
from ascend_parallel.sharding.visualize.explain import text
from ascend_parallel.sharding.visualize.repeated_layers import Fold, folded

OPERATOR, GIVEN, COLLECTIVE, FOLDED, RETURNED = "operator", "given", "collective", "folded", "returned"
END = "returned to the user"


@dataclass
class NodeBox:
    """Lines of text, and what is said when it is pointed at.

    layout
        The layout of what an operator gives, in words; "" for other boxes.
    """

    kind: str
    lines: list[str]
    hint: str
    layout: str = ""
    configured: bool = False


@dataclass
class Picture:
    """Boxes by name, and arrows from one to another with what is said of them."""

    boxes: dict[str, NodeBox] = field(default_factory=dict)
    arrows: dict[tuple[str, str], str] = field(default_factory=dict)

    def is_thick(self, arrow: tuple[str, str]) -> bool:
        """Tell whether an arrow leads into or out of a collective."""
        return any(self.boxes[end].kind == COLLECTIVE for end in arrow)


def picture(plan: ShardingPlan) -> Picture:
    """Return what is to be drawn."""
    return _Painter(plan).paint()


def layout_text(plan: ShardingPlan, layout: Layout) -> str:
    """Return a layout with the names of the mesh dimensions, such as "dp S(0), mp R"."""
    return ", ".join(f"{name} {state}" for name, state in zip(plan.mesh.dim_names, layout, strict=True))


def moves(way: Redistribution | None, plan: ShardingPlan) -> list[str]:
    """Return the steps that communicate, in words."""
    steps = way.steps if way is not None else ()
    return [step.text(plan.mesh.dim_names[step.mesh_dim]) for step in steps if step.nbytes]


def both_ways(one: Conversion, plan: ShardingPlan) -> list[str]:
    """Return what a conversion communicates, forward and then backward."""
    return [*moves(one.ahead, plan), *(f"backward: {said}" for said in moves(one.back, plan))]


class _Painter:
    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._picture = Picture()
        folds = folded(plan)
        self._folds = {f"fold {index}": fold for index, fold in enumerate(folds)}
        self._shown = {name: name for name, node in plan.graph.nodes.items() if node.kind in (CALL, INPUT)}
        for title, fold in self._folds.items():
            self._shown |= dict.fromkeys(fold.nodes, title)
        self._conversions: dict[Value, dict[tuple[Layout, Layout], Conversion]] = {}
        for one in plan.conversions:
            self._conversions.setdefault(one.value, {})[one.source, one.target] = one
        leaves = pytree.tree_leaves(plan.graph.outputs, is_leaf=lambda leaf: isinstance(leaf, Value))
        self._returned = {leaf for leaf in leaves if isinstance(leaf, Value)}

    def paint(self) -> Picture:
        for name, title in self._shown.items():
            if title not in self._picture.boxes:
                fold = self._folds.get(title)
                self._picture.boxes[title] = self._box(self._plan.graph.nodes[name]) if fold is None else _box_of(fold)
        self._picture.boxes[END] = NodeBox(RETURNED, ["returned"], "what the model returns, whole on every rank")
        for value, readers in self._plan.graph.readers().items():
            kind = self._plan.graph.nodes[value.node].kind
            if kind == PARAMETER:
                self._add_weight(value, [name for name, _ in readers])
            elif kind not in (BUFFER, CONSTANT):
                self._add_arrows(value, [(name, self._plan.inputs[name][index]) for name, index in readers])
        return self._picture

    def _box(self, node: Node) -> NodeBox:
        plan = self._plan
        gives = " | ".join(dict.fromkeys(layout_text(plan, plan.layouts[value]) for value in _outputs(node)))
        shapes = ", ".join(f"{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')}" for meta in node.outputs)
        if node.kind != CALL:
            return NodeBox(GIVEN, [f"input {node.source}", gives], shapes, gives)
        title = f"{node.module} {operator_name(node)}".strip()
        reads = [f"reads {layout_text(plan, one)}" for one in plan.inputs[node.name]]
        itself = [
            f"itself: {step.text(plan.mesh.dim_names[step.mesh_dim])}"
            for step in plan.op_collectives.get(node.name, ())
        ]
        hint = "\n".join([title, *reads, f"gives {gives}", shapes, plan.why(node), *itself])
        return NodeBox(OPERATOR, [title, gives], hint, gives, node.name in plan.configured)

    def _add_weight(self, value: Value, readers: Sequence[str]) -> None:
        """Write a weight, its layout and its collectives into the boxes of its readers."""
        plan = self._plan
        source = plan.graph.nodes[value.node].source
        for name in dict.fromkeys(readers):
            box = self._picture.boxes[self._shown[name]]
            if box.kind != OPERATOR:
                continue
            box.lines.append(f"{source.rpartition('.')[2]}: {layout_text(plan, plan.layouts[value])}")
            said = [line for one in self._conversions.get(value, {}).values() for line in both_ways(one, plan)]
            box.lines += said
            box.hint += "\n" + "\n".join([f"{source} {list(plan.graph.meta(value).shape)}", *said])

    def _add_arrows(self, value: Value, readers: Sequence[tuple[str, Layout]]) -> None:
        """Lead a tensor to its readers, through its collectives."""
        plan, start = self._plan, self._shown[value.node]
        source, at = start, plan.layouts[value]
        ends = dict.fromkeys((self._shown[name], layout) for name, layout in readers if self._shown[name] != start)
        if value in plan.shared_layouts and ends:
            source, at = self._through(value, source, at, plan.shared_layouts[value]), plan.shared_layouts[value]
        for end, layout in ends:
            self._picture.arrows[self._through(value, source, at, layout), end] = self._said(value, at, layout)
        if value in self._returned:
            wanted = plan.returned_layout(value)
            last = self._through(value, start, plan.layouts[value], wanted)
            self._picture.arrows[last, END] = self._said(value, plan.layouts[value], wanted)

    def _through(self, value: Value, source: str, before: Layout, after: Layout) -> str:
        """Draw a collective, if there is one, and return the box from which the tensor goes on."""
        one = self._conversions.get(value, {}).get((before, after))
        if one is None or not one.communicates:
            return source
        title = f"collective {value.node} {value.index} {text(before)} to {text(after)}"
        plan = self._plan
        names = plan.mesh.dim_names
        hint = [f"{layout_text(plan, before)} to {layout_text(plan, after)}", f"forward: {one.ahead.text(names)}"]
        hint += [f"backward: {one.back.text(names)}"] if one.back is not None else []
        self._picture.boxes[title] = NodeBox(COLLECTIVE, both_ways(one, plan), "\n".join(hint))
        self._picture.arrows[source, title] = self._said(value, before, before)
        return title

    def _said(self, value: Value, before: Layout, after: Layout) -> str:
        meta, plan = self._plan.graph.meta(value), self._plan
        change = "" if before == after else f", read as {layout_text(plan, after)}"
        return f"{value.node} {list(meta.shape)}: {layout_text(plan, before)}{change}"


def _box_of(fold: Fold) -> NodeBox:
    where = fold.layers[0] if len(fold.layers) == 1 else f"{fold.layers[0]} to {fold.layers[-1]}"
    alike = "laid out as it is" if not fold.others else f"{fold.others} of them laid out otherwise"
    lines = [f"{where}: {len(fold.layers)} more like {fold.like}", alike, *fold.collectives]
    return NodeBox(FOLDED, lines, "left out of the picture; the table below has their collectives")


def _outputs(node: Node) -> Iterator[Value]:
    return (Value(node.name, index) for index in range(len(node.outputs)))
