"""Which operators to configure before propagation, how, why, and what leaving each out would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ascend_parallel.sharding.graph import CALL, Graph, Node, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.compute_cost import seconds as seconds_of
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, operator_name
from ascend_parallel.sharding.planner.options import Option, signature
from ascend_parallel.sharding.planner.propagate import HARDWARE, propagate
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.principles import principles
from ascend_parallel.sharding.visualize.repeated_layers import layer_of, repeated
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

Entry = Any
InStrategy = tuple[Entry, ...]
"""Of each input a tuple of cuts per dimension, or a list of placements where it is a part of a sum."""


@dataclass(frozen=True)
class Advised:
    """One operator, or the same one of every repeated layer.

    pattern
        Its name for `propagate`.
    count
        How many operators the pattern names.
    principles, reason
        Which of the published principles name it, and why in a sentence.
    in_strategy
        The proposed strategy: the automatic plan's.
    seconds
        What propagation makes a step longer if this strategy alone is left out: computing and communicating.
    """

    pattern: str
    operator: str
    count: int
    principles: tuple[int, ...]
    reason: str
    in_strategy: InStrategy
    seconds: float = 0.0


@dataclass(frozen=True)
class Advice:
    """What to configure.

    seconds
        Predicted time of a step, computing and communicating, with all of it.
    notes
        Operators that should be configured but have no name of their own.
    """

    advised: tuple[Advised, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def strategies(self) -> dict[str, object]:
        """The proposed strategies, for `propagate`."""
        return {one.pattern: (one.in_strategy, None) for one in self.advised}

    def __str__(self) -> str:
        """Return a table in words, times in ms."""
        heads = ("configure", "operators", "proposed strategy", "left out")
        rows = [
            (
                one.pattern,
                f"{one.count} x {one.operator}",
                ", ".join(map(_text, one.in_strategy)),
                f"{1e3 * one.seconds:+.3f} ms",
            )
            for one in self.advised
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (heads, *rows)]
        reasons = [f"    {one.reason}" for one in self.advised]
        lines = [lines[0], *(line for pair in zip(lines[1:], reasons, strict=True) for line in pair)]
        end = f"all configured, propagation gives a step of {1e3 * self.seconds:.3f} ms; without one, so much more"
        return "\n".join([*lines, end, *(f"not to be named: {note}" for note in self.notes)])


def advise(
    model: torch.nn.Module,
    args: Sequence[Any],
    mesh: ProcessMesh,
    kwargs: Mapping[str, Any] | None = None,
    hardware: str = HARDWARE,
) -> Advice:
    """Say which operators of ``model(*args, **kwargs)`` to configure, after the four published principles.

    What leaving a strategy out costs is computed: propagation with the objective "redistribution", as published, once
    with all strategies and once without this one; the difference of the two plans' times of a step in seconds, all
    collectives and each rank's computing in it. It takes as many propagations as there are lines of advice.
    """
    graph = trace(model, args, kwargs)
    automatic = propagate(graph, mesh, objective="time", hardware=hardware)
    proposals, notes = _proposals(automatic)
    strategies = {one.pattern: (one.in_strategy, None) for one in proposals}

    def step(without: str = "") -> float:
        given = {pattern: one for pattern, one in strategies.items() if pattern != without}
        return step_seconds(propagate(graph, mesh, given, hardware=hardware), hardware)

    whole = step()
    advised = tuple(replace(one, seconds=step(one.pattern) - whole) for one in proposals)
    return Advice(advised, whole, tuple(notes))


def step_seconds(plan: ShardingPlan, hardware: str = HARDWARE) -> float:
    """Return the time of a step of a plan, whatever its objective: its collectives, and what a rank computes."""
    shape, model = tuple(plan.mesh.shape), CostModel(find_hardware(hardware))
    computing = 0.0
    for node in plan.graph.nodes.values():
        if node.call is not None:
            outputs = tuple(plan.layouts[Value(node.name, index)] for index in range(len(node.outputs)))
            computing += seconds_of(node.call, Option(plan.inputs[node.name], outputs), shape, model)
    return plan.seconds + computing


def _proposals(plan: ShardingPlan) -> tuple[list[Advised], list[str]]:
    """Return the advice without its costs, and what has no name."""
    reasons = principles(plan)
    groups: dict[tuple[str, str], list[Node]] = {}
    for name in reasons:
        node = plan.graph.nodes[name]
        groups.setdefault((repeated(node.module), operator_name(node)), []).append(node)
    found: list[Advised] = []
    notes: dict[str, None] = {}
    for path, nodes in _alike(plan.graph, groups):
        modules = list(dict.fromkeys(node.module for node in nodes))
        # One layer speaks for all, so that its operators fit together: one from the middle, not the first or last.
        those = [node for node in nodes if node.module == modules[len(modules) // 2]]
        strategies = {repr(_in_strategy(plan, node)) for node in those}
        pattern, operator = _pattern(plan.graph, path, nodes), operator_name(those[0])
        why = {number: why for node in reversed(those) for number, why in reasons[node.name].items()}
        said = "; ".join(f"({number}) {why[number]}" for number in sorted(why))
        if pattern is None or len(strategies) > 1:
            notes[f"{operator} in {path or 'the model'}: {said}; to have a name, each call needs its own module"] = None
            continue
        found.append(Advised(pattern, operator, len(nodes), tuple(sorted(why)), said, _in_strategy(plan, those[0])))
    return found, list(notes)


def _alike(graph: Graph, groups: Mapping[tuple[str, str], list[Node]]) -> Iterator[tuple[str, list[Node]]]:
    """Return paths and the operators there: one path for repeated layers, or one for each that is not as the others.

    A layer runs several operators: those of an nn.Sequential, each a module with a number, are no repeated layers.
    """
    sizes = Counter(layer_of(node.module) for node in graph.nodes.values() if node.kind == CALL)
    for (path, _), nodes in groups.items():
        modules: dict[str, list[Node]] = {}
        for node in nodes:
            modules.setdefault(node.module, []).append(node)
        kinds = {tuple(map(signature, several)) for several in modules.values()}
        alike = len(modules) == 1 or (len(kinds) == 1 and all(sizes[layer_of(module)] > 1 for module in modules))
        yield from [(path, nodes)] if alike else modules.items()


def _pattern(graph: Graph, path: str, nodes: Sequence[Node]) -> str | None:
    """Return the shortest pattern that names these operators and no others, if one does."""
    names = {node.name for node in nodes}
    for pattern in (path, f"{path}:{operator_name(nodes[0])}"):
        try:
            named = {node.name for node in named_nodes(graph, pattern)} if pattern else set()
        except StrategyError:  # the path alone does not say which of the module's operators is meant
            continue
        if named == names:
            return pattern
    return None


def _in_strategy(plan: ShardingPlan, node: Node) -> InStrategy:
    """Return how a plan lays out an operator's inputs, in the words that users write."""
    assert node.call is not None
    pairs = zip(node.call.inputs, plan.inputs[node.name], strict=True)
    return tuple(_cuts(len(meta.shape), layout, plan.mesh.dim_names) for meta, layout in pairs)


def _cuts(dims: int, layout: Layout, names: Sequence[str]) -> Entry:
    if any(state.kind == "partial" for state in layout):
        return [state.placement for state in layout]
    cut: list[tuple[str, ...]] = [()] * dims
    for state, name in zip(layout, names, strict=True):
        if state.kind == "shard":
            cut[state.dim] = (*cut[state.dim], name)
    return tuple(1 if not by else by[0] if len(by) == 1 else by for by in cut)


def _text(entry: Entry) -> str:
    """Return a strategy of one tensor without quotes, such as "(dp, 1, mp)"."""
    if isinstance(entry, list):
        return " ".join(map(str, entry))
    parts = ["*".join(one) if isinstance(one, tuple) else str(one) for one in entry]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
