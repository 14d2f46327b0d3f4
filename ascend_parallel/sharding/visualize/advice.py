"""Advises which operators to configure before propagation, with a strategy, a reason and the cost of leaving it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch

from ascend_parallel.sharding.graph import CALL, Graph, Node
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import seconds as seconds_of
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, operator_name, ordinals_of
from ascend_parallel.sharding.planner.options import Option, signature
from ascend_parallel.sharding.planner.propagate import HARDWARE, propagate
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.principles import TITLES, Reasons, principles
from ascend_parallel.sharding.visualize.repeated_layers import layer_of, repeated
from ascend_parallel.text import some_of
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

Entry = Any


class Data(TypedDict):
    """The arguments of `propagate` about the batch."""

    data_dim: str | None
    only_data_cuts_batch: bool


InStrategy = tuple[Entry, ...]
"""For each input a tuple of cuts per dimension, or a list of placements if the input is a partial sum."""


@dataclass(frozen=True)
class Advised:
    """An operator, or the same operator of every repeated layer.

    pattern
        The operator's name for `propagate`.
    count
        How many operators the pattern names.
    principles, reason
        The published principles that name the operator, and why, in a sentence.
    in_strategy
        The proposed strategy, from the automatic plan.
    seconds
        How much longer a step takes, computing and communicating, if this strategy alone is left out.
    """

    pattern: str
    operator: str
    count: int
    principles: tuple[int, ...]
    reason: str
    in_strategy: InStrategy
    seconds: float = 0.0

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The cells of a table: pattern, operators, strategy, cost."""
        strategy = ", ".join(map(_text, self.in_strategy))
        return self.pattern, f"{self.count} x {self.operator}", strategy, f"{1e3 * self.seconds:+.3f} ms"


@dataclass(frozen=True)
class Advice:
    """The operators to configure.

    seconds
        Predicted time of a step, computing and communicating, with all proposed strategies.
    savings
        By principle, how much longer a step takes without any of the strategies that it proposes.
    notes
        Operators that should be configured but that no pattern names alone.
    """

    advised: tuple[Advised, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    savings: Mapping[int, float] = field(default_factory=dict)

    @property
    def strategies(self) -> dict[str, object]:
        """The proposed strategies, for `propagate`."""
        return {advised.pattern: (advised.in_strategy, None) for advised in self.advised}

    def __str__(self) -> str:
        """Return a text table, with times in ms; operators with equal strategies and reasons share their reason."""
        heads = ("configure", "operators", "proposed strategy", "left out")
        folded: dict[tuple[object, ...], list[Advised]] = {}
        for advised in self.advised:
            folded.setdefault((advised.operator, repr(advised.in_strategy), advised.reason), []).append(advised)
        rows = [[advised.row for advised in same] for same in folded.values()]
        widths = [max(map(len, column)) for column in zip(heads, *(row for each in rows for row in each), strict=True)]
        lines = ["  ".join(map(str.ljust, heads, widths)).rstrip()]
        for same, each in zip(folded.values(), rows, strict=True):
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in each]
            lines.append(f"    {same[0].reason}")
        end = f"a step takes {1e3 * self.seconds:.3f} ms with all strategies, 'left out' longer without that strategy"
        by_principle = [self._principle(number, title) for number, title in TITLES.items()]
        return "\n".join([*lines, end, *by_principle, *(f"no pattern names it alone: {note}" for note in self.notes)])

    def _principle(self, number: int, title: str) -> str:
        """Return what a principle names, and what its strategies save together."""
        patterns = [advised.pattern for advised in self.advised if number in advised.principles]
        if not patterns:
            return f"({number}) {title}: none"
        saved = f": without them {1e3 * self.savings[number]:+.3f} ms" if number in self.savings else ""
        return f"({number}) {title}: {some_of(patterns, 6)}{saved}"


def advise(
    model: torch.nn.Module,
    args: Sequence[Any],
    mesh: ProcessMesh,
    kwargs: Mapping[str, Any] | None = None,
    hardware: str = HARDWARE,
    data_dim: str | None = None,
) -> Advice:
    """Return which operators of ``model(*args, **kwargs)`` to configure, after the four published principles.

    The cost of leaving out a strategy is the difference between the step times of two plans, with all strategies and
    without this strategy. Both plans come from propagation with the objective "redistribution", as published. A step
    time includes all collectives and each rank's computation. Every line of advice takes a propagation.

    data_dim
        The mesh dimension of data parallelism, as for `propagate`: it alone cuts the batch, and no weight.
    """
    graph = trace(model, args, kwargs)
    data: Data = {"data_dim": data_dim, "only_data_cuts_batch": data_dim is not None}
    automatic = propagate(graph, mesh, objective="time", hardware=hardware, **data)
    proposals, notes = _proposals(automatic)
    strategies = {advised.pattern: (advised.in_strategy, None) for advised in proposals}

    def step(*without: str) -> float:
        others = {pattern: strategy for pattern, strategy in strategies.items() if pattern not in without}
        return step_seconds(propagate(graph, mesh, others, hardware=hardware, **data), hardware)

    with_all = step()
    advised = tuple(replace(proposal, seconds=step(proposal.pattern) - with_all) for proposal in proposals)
    named = {number: [each.pattern for each in advised if number in each.principles] for number in TITLES}
    savings = {number: step(*patterns) - with_all for number, patterns in named.items() if patterns}
    return Advice(advised, with_all, tuple(notes), savings)


def step_seconds(plan: ShardingPlan, hardware: str = HARDWARE) -> float:
    """Return the predicted step time of a plan with any objective: its collectives and a rank's computation."""
    shape, model = tuple(plan.mesh.shape), CostModel(find_hardware(hardware))
    computing = 0.0
    for node in plan.graph.nodes.values():
        if node.call is not None:
            option = Option(plan.inputs[node.name], plan.output_layouts(node))
            computing += seconds_of(node.call, option, shape, model)
    return plan.seconds + computing


def _proposals(plan: ShardingPlan) -> tuple[list[Advised], list[str]]:
    """Return the advice without costs, and notes on operators that no pattern names alone."""
    reasons = principles(plan)
    groups: dict[tuple[str, str], list[Node]] = {}
    for name in reasons:
        node = plan.graph.nodes[name]
        groups.setdefault((repeated(node.module), operator_name(node)), []).append(node)
    found: list[Advised] = []
    notes: dict[str, None] = {}
    for path, nodes in _alike(plan.graph, groups):
        modules = list(dict.fromkeys(node.module for node in nodes))
        # A layer from the middle stands for all layers, so that the strategies of its operators fit together.
        chosen = [node for node in nodes if node.module == modules[len(modules) // 2]]
        strategies = {repr(_in_strategy(plan, node)) for node in chosen}
        pattern, operator = _pattern(plan.graph, path, nodes), operator_name(chosen[0])
        why = {number: why for node in reversed(chosen) for number, why in reasons[node.name].items()}
        reason = "; ".join(f"({number}) {why[number]}" for number in sorted(why))
        if pattern is None or len(strategies) > 1:
            numbered = _numbered(plan, path, nodes, reasons)
            if numbered:
                found += numbered
                continue
            notes[f"{operator} in {path or 'the model'}: {reason}; give each call its own module"] = None
            continue
        strategy = _in_strategy(plan, chosen[0])
        found.append(Advised(pattern, operator, len(nodes), tuple(sorted(why)), reason, strategy))
    return found, list(notes)


def _numbered(plan: ShardingPlan, path: str, nodes: Sequence[Node], reasons: Mapping[str, Reasons]) -> list[Advised]:
    """Return advice for each of a module's calls of one operator by its number; [] if numbers do not name them alone.

    So functional matmuls that share a module have names: "layers.*.attention:matmul#0".
    """
    operator, ordinals = operator_name(nodes[0]), _ordinals(plan.graph, nodes)
    found = []
    for number in sorted({ordinals[node.name] for node in nodes}):
        members = [node for node in nodes if ordinals[node.name] == number]
        pattern = f"{path}:{operator}#{number}"
        node = members[len(members) // 2]
        if {each.name for each in named_nodes(plan.graph, pattern)} != {each.name for each in members}:
            return []
        why = reasons[node.name]
        reason = "; ".join(f"({principle}) {why[principle]}" for principle in sorted(why))
        strategy = _in_strategy(plan, node)
        found.append(Advised(pattern, operator, len(members), tuple(sorted(why)), reason, strategy))
    return found


def _ordinals(graph: Graph, nodes: Sequence[Node]) -> dict[str, int]:
    """Return which of its module's calls of the operator each node is, by name."""
    modules, operator = {node.module for node in nodes}, operator_name(nodes[0])
    calls = [node for node in graph.nodes.values() if node.kind == CALL and node.module in modules]
    return ordinals_of([call for call in calls if operator_name(call) == operator])


def _alike(graph: Graph, groups: Mapping[tuple[str, str], list[Node]]) -> Iterator[tuple[str, list[Node]]]:
    """Yield paths and their operators: a common path for equal repeated layers, separate paths for unequal layers.

    A layer has several operators. So the numbered modules of an nn.Sequential, of an operator each, are not layers.
    """
    sizes = Counter(layer_of(node.module) for node in graph.nodes.values() if node.kind == CALL)
    for (path, _), nodes in groups.items():
        modules: dict[str, list[Node]] = {}
        for node in nodes:
            modules.setdefault(node.module, []).append(node)
        kinds = {tuple(map(signature, members)) for members in modules.values()}
        alike = len(modules) == 1 or (len(kinds) == 1 and all(sizes[layer_of(module)] > 1 for module in modules))
        yield from [(path, nodes)] if alike else modules.items()


def _pattern(graph: Graph, path: str, nodes: Sequence[Node]) -> str | None:
    """Return the shortest pattern that names these operators and no others; None if there is none."""
    names = {node.name for node in nodes}
    for pattern in (path, f"{path}:{operator_name(nodes[0])}"):
        try:
            named = {node.name for node in named_nodes(graph, pattern)} if pattern else set()
        except StrategyError:  # the path alone is ambiguous: the module has several operators
            continue
        if named == names:
            return pattern
    return None


def _in_strategy(plan: ShardingPlan, node: Node) -> InStrategy:
    """Return the layouts of an operator's inputs as a strategy that `propagate` takes."""
    assert node.call is not None
    pairs = zip(node.call.inputs, plan.inputs[node.name], strict=True)
    return tuple(_cuts(len(meta.shape), layout, plan.mesh.dim_names) for meta, layout in pairs)


def _cuts(dims: int, layout: Layout, names: Sequence[str]) -> Entry:
    if any(placement.kind == "partial" for placement in layout):
        return [placement.placement for placement in layout]
    cut: list[tuple[str, ...]] = [()] * dims
    for placement, name in zip(layout, names, strict=True):
        if placement.kind == "shard":
            cut[placement.dim] = (*cut[placement.dim], name)
    return tuple(1 if not by else by[0] if len(by) == 1 else by for by in cut)


def _text(entry: Entry) -> str:
    """Return a tensor's strategy without quotes, such as "(dp, 1, mp)"."""
    if isinstance(entry, list):
        return " ".join(map(str, entry))
    parts = ["*".join(cut) if isinstance(cut, tuple) else str(cut) for cut in entry]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
