"""Repeated layers of a graph, and which of them a picture leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_parallel.sharding.graph import CALL, Graph, Node
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan

# The number of equal layers that a picture shows.
SHOWN = 2
Layouts = list[tuple[Layout, ...]]


@dataclass(frozen=True)
class Fold:
    """Consecutive layers that a picture leaves out.

    nodes
        All operators from the first to the last of these layers, including operators between the layers.
    like
        The last shown layer with the same operators.
    others
        The number of layers with other layouts than the layer `like`.
    collectives
        The collectives of these layers with their total time, in a line; empty if there are none.
    """

    layers: tuple[str, ...]
    nodes: tuple[str, ...]
    like: str
    others: int
    collectives: tuple[str, ...] = ()


def layer_of(path: str) -> str:
    """Return the path of a module's layer: the path up to its first number; "" for a module outside of layers."""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def repeated(path: str) -> str:
    """Return a path with "*" for each number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def folded(plan: ShardingPlan) -> list[Fold]:
    """Return the folds: of layers with the same operators on the same shapes all but the first two.

    A fold is a contiguous part of the operators in running order. So no shown operator both reads from a fold and is
    read by the same fold.
    """
    like = _left_out(plan.graph)
    runs: list[list[Node]] = []
    between: list[Node] | None = None  # operators outside of layers after a folded layer; None if no fold is open
    for node in plan.graph.of_kind(CALL):
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


def _left_out(graph: Graph) -> dict[str, str]:
    """Return the layers that are left out, each with the shown layer that stands for it."""
    sizes = Counter(layer_of(node.module) for node in graph.of_kind(CALL))
    kinds: dict[tuple[str, str], list[str]] = {}
    for layer, size in sizes.items():
        if layer in graph.blocks and size > 1:  # the modules of an nn.Sequential are no layers
            kinds.setdefault((repeated(layer), graph.blocks[layer]), []).append(layer)
    return {layer: equal[SHOWN - 1] for equal in kinds.values() for layer in equal[SHOWN:]}


def _fold(plan: ShardingPlan, nodes: Sequence[Node], like: dict[str, str]) -> Fold:
    layers = tuple(dict.fromkeys(layer_of(node.module) for node in nodes if layer_of(node.module)))
    shown = like[layers[0]]
    found: dict[str, Layouts] = {}
    for node in plan.graph.nodes.values():
        if layer_of(node.module) in {shown, *layers}:
            layouts = (*plan.inputs[node.name], *plan.output_layouts(node))
            found.setdefault(layer_of(node.module), []).append(layouts)
    others = sum(found[layer] != found[shown] for layer in layers)
    names = {node.name for node in nodes}
    kinds: Counter[str] = Counter()
    seconds = 0.0
    for conversion in plan.conversions:
        if conversion.communicates and conversion.reader and set(conversion.reader.split(", ")) <= names:
            seconds += conversion.seconds
            both = (conversion.ahead, conversion.back)
            kinds.update(step.kind for each in both if each for step in each.steps if step.nbytes)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    collectives = (f"{counts}: {1e3 * seconds:.3g} ms",) if counts else ()
    return Fold(layers, tuple(node.name for node in nodes), shown, others, collectives)
