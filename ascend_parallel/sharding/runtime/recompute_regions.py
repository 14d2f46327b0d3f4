"""Which nodes of a plan run again in backward: consecutive nodes, as regions. Pure: no process is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from ascend_parallel.sharding.graph import Graph, Node, Value
from ascend_parallel.sharding.planner.operator_strategy import operator_name, path_matches
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules import draws
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.recompute_config import (
    Recompute,
    calls,
    check_recompute,
    found_nodes,
    nodes_of,
    prefixes,
)

VIEWS = """
    alias detach expand permute select slice split split_with_sizes chunk unbind squeeze t transpose unflatten unsqueeze
    view
"""
# Operators of which autograd saves no tensor: at the end of a region there is nothing to run again for them.
NOTHING_SAVED = f"{VIEWS} add sub neg clone contiguous flatten reshape stack cat sum to _to_copy _unsafe_view"


@dataclass(frozen=True)
class Region:
    """Consecutive nodes that run again in backward, before the first of their gradients is computed.

    module
        The marked module; "" for single operators.
    nodes
        In the order of the graph.
    reads, read_shared
        Tensors from outside, as they are produced, and in their `via` layout: what is kept.
    gives, given_shared
        Tensors that are needed after the region.
    kept
        Nodes whose results are kept: exceptions, and kernels and conversions where collectives are.
    read_again
        Nodes whose results are read inside the region: those of the others are not computed twice.
    last
        The node at whose reads the second run ends: nothing that it computes is needed.
    again
        Whether collectives run again.
    fenced
        Whether any do, also the gathers of parameters that are not kept whole: all ranks then have to begin and end the
        second run at the same operators.
    """

    module: str
    nodes: tuple[str, ...]
    reads: tuple[Value, ...]
    read_shared: tuple[Value, ...]
    gives: tuple[Value, ...]
    given_shared: tuple[Value, ...]
    kept: Set[str]
    read_again: Set[str]
    last: str
    again: bool
    fenced: bool


def regions(plan: ShardingPlan, schedule: Schedule, recompute: Recompute, *, part: bool = False) -> dict[str, Region]:
    """Return the regions by their first node.

    part
        The plan is of a part of the model, such as a pipeline's stage: what patterns name may be elsewhere.

    Raises as `check_recompute`, unless it is a part's.
    """
    if not part:
        check_recompute(plan.graph, recompute)
    return {one.nodes[0]: one for one in _Regions(plan, schedule, recompute).build()}


class _Regions:
    """The regions while they are made. A unit is a node, or the nodes of a kernel, at the place of the first."""

    def __init__(self, plan: ShardingPlan, schedule: Schedule, recompute: Recompute) -> None:
        self._plan, self._graph, self._schedule, self._recompute = plan, plan.graph, schedule, recompute
        self._readers = plan.graph.readers()
        self._units = list(_units(plan.graph, schedule))
        self._unit_of = {name: place for place, unit in enumerate(self._units) for name in unit}
        self._keep = {one.name for pattern in recompute.keep for one in found_nodes(plan.graph, pattern)}
        self._owners = self._marked()

    def build(self) -> Iterator[Region]:
        """Give the regions in the order of the graph."""
        for owner, span in self._runs():
            last = next((place for place in reversed(span) if self._saves(place)), None)
            marked = owner is not None or any(name in self._operators for place in span for name in self._units[place])
            if last is not None and marked:
                yield self._region(owner, [place for place in span if place <= last])

    def _marked(self) -> dict[str, str]:
        """Return the outermost marked module of each node in one."""
        patterns = [pattern for pattern in self._recompute.modules if ":" not in pattern]
        found = {}
        for node in calls(self._graph):
            owners = [path for path in prefixes(node.module) if any(path_matches(path, one) for one in patterns)]
            if owners:
                found[node.name] = owners[0]
        return found

    def _runs(self) -> Iterator[tuple[str | None, list[int]]]:
        """Give consecutive units of one marked module, and (None) those from a marked operator to its last reader."""
        spans = self._operator_spans()
        owner: str | None = None
        run: list[int] = []
        for place, unit in enumerate(self._units):
            owners = {self._owners.get(name) for name in unit}
            mine = owners.pop() if len(owners) == 1 else None
            inside = mine is not None or place in spans
            if run and (not inside or mine != owner or (mine is None and spans[place] != spans[run[-1]])):
                yield owner, run
                run = []
            if inside:
                owner = mine
                run.append(place)
        if run:
            yield owner, run

    def _operator_spans(self) -> dict[int, int]:
        """Return, for each unit of a span of single operators, the number of the span; overlapping ones are one."""
        operators = [name for one in self._recompute.modules if ":" in one for name in nodes_of(self._graph, one)]
        self._operators = {name for name in operators if name not in self._owners}
        ends = [(self._unit_of[name], self._last_reader(name)) for name in self._operators]
        spans: list[list[int]] = []
        for start, end in sorted(ends):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([start, end])
        return {place: number for number, (start, end) in enumerate(spans) for place in range(start, end + 1)}

    def _last_reader(self, name: str) -> int:
        """Return the last unit that reads a node's results, or views of them."""
        found, waiting = self._unit_of[name], [name]
        while waiting:
            node = self._graph.nodes[waiting.pop()]
            for reader in (one for value in _outputs(node) for one, _ in self._readers[value]):
                found = max(found, self._unit_of[reader])
                if operator_name(self._graph.nodes[reader]) in VIEWS.split():
                    waiting.append(reader)
        return found

    def _saves(self, place: int) -> bool:
        """Tell whether autograd may save tensors of a unit."""
        nodes = [self._graph.nodes[name] for name in self._units[place]]
        differentiable = any(value in self._plan.differentiable for node in nodes for value in _outputs(node))
        return differentiable and any(operator_name(node) not in NOTHING_SAVED.split() for node in nodes)

    def _region(self, owner: str | None, span: Sequence[int]) -> Region:
        graph, via = self._graph, self._schedule.shared_layouts
        inside = {name for place in span for name in self._units[place]}
        nodes = [node for node in graph.nodes.values() if node.name in inside]
        last, needed = self._units[span[-1]], graph.kept
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value.node not in inside)
        readers = {value: {name for name, _ in self._readers[value]} for node in nodes for value in _outputs(node)}
        read_shared = [
            value for value in read if value in via and any(name not in inside for name, _ in self._readers[value])
        ]
        # A tensor with a layout for all its readers is converted inside if one of them is.
        shared_values = [value for value, names in readers.items() if value in via and names & inside]
        return Region(
            module=owner or "",
            nodes=tuple(node.name for node in nodes),
            reads=tuple(value for value in read if value not in read_shared),
            read_shared=tuple(read_shared),
            gives=tuple(
                value
                for value, names in readers.items()
                if value in needed or (names - inside and value not in shared_values)
            ),
            given_shared=tuple(value for value in shared_values if readers[value] - inside),
            kept=self._kept(nodes, owner) - set(last),
            read_again={value.node for value, names in readers.items() if names & inside},
            last=last[0],
            again=(again := self._recompute.collectives == "again"),
            fenced=again or not self._plan.regathered.isdisjoint(read),
        )

    def _kept(self, nodes: Sequence[Node], owner: str | None) -> set[str]:
        """Return the exceptions; around single operators that is all but them and what draws random numbers."""
        if owner is not None:
            return {node.name for node in nodes if node.name in self._keep}
        others = (node for node in nodes if node.name not in self._operators)
        return {node.name for node in others if node.call is not None and not draws(node.call)}


def _units(graph: Graph, schedule: Schedule) -> Iterator[tuple[str, ...]]:
    done: set[str] = set()
    for node in calls(graph):
        if node.name not in done:
            kernel = schedule.kernels.get(node.name)
            unit = (node.name,) if kernel is None else tuple(kernel.nodes)
            done |= set(unit)
            yield unit


def _outputs(node: Node) -> list[Value]:
    return [Value(node.name, index) for index in range(len(node.outputs))]
