"""Repeated layers of a graph: which are alike, and which a picture leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_parallel.sharding.graph import CALL, Node, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.options import signature
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan

# So many of the layers that are alike are shown.
SHOWN = 2
Layouts = list[tuple[Layout, ...]]


@dataclass(frozen=True)
class Fold:
    """Layers that follow each other and are left out.

    nodes
        All operators from the first of them to the last, also what stands between them.
    like
        The last layer that is shown of those that run the same operators.
    others
        How many of them are laid out otherwise than that one.
    collectives
        What of collectives runs in them, a line for each kind.
    """

    layers: tuple[str, ...]
    nodes: tuple[str, ...]
    like: str
    others: int
    collectives: tuple[str, ...] = ()


def layer_of(path: str) -> str:
    """Return the path of the layer that a module is in: up to the first number; "" if it is in none."""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def repeated(path: str) -> str:
    """Return a path with "*" for each number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def folded(plan: ShardingPlan) -> list[Fold]:
    """Return what is left out: of layers that run the same operators on the same shapes all but the first two.

    A fold is an unbroken part of the order in which the operators run, so that none that is shown depends on a part of
    it and has another part depend on it.
    """
    calls = [node for node in plan.graph.nodes.values() if node.kind == CALL]
    like = _left_out(calls)
    runs: list[list[Node]] = []
    between: list[Node] | None = None  # operators behind a layer that is left out, of no layer; None: none before them
    for node in calls:
        layer = layer_of(node.module)
        if layer in like:
            if between is None:
                runs.append([])
            runs[-1] += [*(between or []), node]
            between = []
        elif layer:
            between = None
        elif between is not None:
            between.append(node)
    return [_fold(plan, run, like) for run in runs]


def _left_out(calls: Sequence[Node]) -> dict[str, str]:
    """Return the layers that are left out, each with the one that is shown for it."""
    layers: dict[str, list[Node]] = {}
    for node in calls:
        if layer_of(node.module):
            layers.setdefault(layer_of(node.module), []).append(node)
    kinds: dict[object, list[str]] = {}
    for layer, nodes in layers.items():
        if len(nodes) > 1:  # the modules of an nn.Sequential are no layers
            kinds.setdefault((repeated(layer), tuple(map(signature, nodes))), []).append(layer)
    return {layer: alike[SHOWN - 1] for alike in kinds.values() for layer in alike[SHOWN:]}


def _fold(plan: ShardingPlan, nodes: Sequence[Node], like: dict[str, str]) -> Fold:
    layers = tuple(dict.fromkeys(layer_of(node.module) for node in nodes if layer_of(node.module)))
    shown = like[layers[0]]
    found: dict[str, Layouts] = {}
    for node in plan.graph.nodes.values():
        if layer_of(node.module) in {shown, *layers}:
            outputs = tuple(plan.layouts[Value(node.name, index)] for index in range(len(node.outputs)))
            found.setdefault(layer_of(node.module), []).append((*plan.inputs[node.name], *outputs))
    others = sum(found[layer] != found[shown] for layer in layers)
    names = {node.name for node in nodes}
    kinds: Counter[str] = Counter()
    seconds = 0.0
    for one in plan.conversions:
        if one.communicates and one.reader and set(one.reader.split(", ")) <= names:
            seconds += one.seconds
            kinds.update(step.kind for way in (one.ahead, one.back) if way for step in way.steps if step.nbytes)
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return Fold(
        layers, tuple(node.name for node in nodes), shown, others, (f"{said}: {1e3 * seconds:.3g} ms",) if said else ()
    )
