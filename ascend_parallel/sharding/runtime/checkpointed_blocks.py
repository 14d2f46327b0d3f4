"""Plans the checkpointed blocks: consecutive nodes that backward runs again. Planning runs no collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from ascend_parallel.sharding.graph import CALL, Node, Value
from ascend_parallel.sharding.planner.operator_cost import VIEWS
from ascend_parallel.sharding.planner.operator_strategy import operator_name, path_matches
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules import draws, exchanges
from ascend_parallel.sharding.runtime.recompute_config import (
    Recompute,
    check_recompute,
    found_nodes,
    prefixes,
)

# Operators of which autograd saves no tensor. At the end of a block they need not run again.
NOTHING_SAVED = f"{VIEWS} add sub neg clone contiguous flatten reshape stack cat sum to _to_copy _unsafe_view"


@dataclass(frozen=True)
class CheckpointedBlock:
    """Consecutive nodes that run again in backward, before the first of their gradients is computed.

    module
        The marked module; "" for single operators.
    nodes
        The nodes in the order of the graph.
    reads, read_shared
        The tensors that the block reads from outside, in their own layout and in their shared layout. They are kept.
    gives, given_shared
        The tensors that are read after the block, in their own layout and in their shared layout.
    kept
        The nodes whose results are kept: the exceptions.
    read_inside
        The nodes whose results are read inside the block. Results of the other nodes are not computed twice.
    last
        The node at which the second run ends, after its inputs exist: its own results are not needed.
    recompute_collectives
        Whether the second run repeats the forward's collectives.
    sync_boundary
        Whether the second run has any collective, including gathers of parameters that ZeRO-3 shards. All ranks must
        then begin and end the second run at the same operators.
    """

    module: str
    nodes: tuple[str, ...]
    reads: tuple[Value, ...]
    read_shared: tuple[Value, ...]
    gives: tuple[Value, ...]
    given_shared: tuple[Value, ...]
    kept: Set[str]
    read_inside: Set[str]
    last: str
    recompute_collectives: bool
    sync_boundary: bool


def checkpointed_blocks(
    plan: ShardingPlan, fused_plan: FusedPlan, recompute: Recompute, *, part: bool = False
) -> dict[str, CheckpointedBlock]:
    """Return the blocks by their first node.

    part
        The plan is of a part of the model, such as a pipeline stage, so patterns may name nodes of other parts.

    Raises as `check_recompute`, unless `part` is set.
    """
    if not part:
        check_recompute(plan.graph, recompute)
    return {block.nodes[0]: block for block in _BlockBuilder(plan, fused_plan, recompute).build()}


class _BlockBuilder:
    """Builds the blocks. A unit is a node, or the nodes of a kernel at the position of the first."""

    def __init__(self, plan: ShardingPlan, fused_plan: FusedPlan, recompute: Recompute) -> None:
        self._plan, self._graph, self._fused_plan, self._recompute = plan, plan.graph, fused_plan, recompute
        self._readers, self._kept_values = plan.graph.readers(), plan.graph.kept
        self._order = {name: place for place, name in enumerate(plan.graph.nodes)}
        units = fused_plan.units(plan.graph)
        self._units = [unit for unit in units if plan.graph.nodes[unit[0]].kind == CALL]
        self._unit_of = {name: place for place, unit in enumerate(self._units) for name in unit}
        self._keep = {node.name for pattern in recompute.keep for node in found_nodes(plan.graph, pattern)}
        self._owners = self._marked()

    def build(self) -> Iterator[CheckpointedBlock]:
        """Yield the blocks in the order of the graph."""
        for owner, span in self._runs():
            last = next((place for place in reversed(span) if self._saves(place)), None)
            marked = owner is not None or any(name in self._operators for place in span for name in self._units[place])
            if last is not None and marked:
                yield self._block(owner, [place for place in span if place <= last])

    def _marked(self) -> dict[str, str]:
        """Return the outermost marked module of each node inside a marked module."""
        patterns = [pattern for pattern in self._recompute.modules if ":" not in pattern]
        found = {}
        for node in self._graph.of_kind(CALL):
            paths = prefixes(node.module)
            owners = [path for path in paths if any(path_matches(path, pattern) for pattern in patterns)]
            if owners:
                found[node.name] = owners[0]
        return found

    def _runs(self) -> Iterator[tuple[str | None, list[int]]]:
        """Yield the consecutive units of a marked module, or (None) from a marked operator to its last reader."""
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
        """Return the span number of each unit in a span of single operators; overlapping spans are merged."""
        patterns = [pattern for pattern in self._recompute.modules if ":" in pattern]
        operators = [node for pattern in patterns for node in found_nodes(self._graph, pattern) if node.kind == CALL]
        self._operators = {node.name for node in operators if node.name not in self._owners}
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
        last, waiting = self._unit_of[name], [name]
        while waiting:
            node = self._graph.nodes[waiting.pop()]
            for reader in (reader for value in node.values for reader, _ in self._readers[value]):
                last = max(last, self._unit_of[reader])
                if operator_name(self._graph.nodes[reader]) in VIEWS.split():
                    waiting.append(reader)
        return last

    def _saves(self, place: int) -> bool:
        """Tell whether autograd may save tensors of a unit."""
        nodes = [self._graph.nodes[name] for name in self._units[place]]
        differentiable = any(value in self._plan.differentiable for node in nodes for value in node.values)
        return differentiable and any(operator_name(node) not in NOTHING_SAVED.split() for node in nodes)

    def _block(self, owner: str | None, span: Sequence[int]) -> CheckpointedBlock:
        graph, shared = self._graph, self._fused_plan.shared_layouts
        recompute_collectives = self._recompute.collectives == "recompute"
        inside = {name for place in span for name in self._units[place]}
        nodes = [graph.nodes[name] for name in sorted(inside, key=self._order.__getitem__)]
        last, needed = self._units[span[-1]], self._kept_values
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value.node not in inside)
        readers = {value: {name for name, _ in self._readers[value]} for node in nodes for value in node.values}
        read_shared = [
            value for value in read if value in shared and any(name not in inside for name, _ in self._readers[value])
        ]
        # A tensor with a shared layout is redistributed inside the block if a reader is inside.
        shared_values = [value for value, names in readers.items() if value in shared and names & inside]
        return CheckpointedBlock(
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
            read_inside={value.node for value, names in readers.items() if names & inside},
            last=last[0],
            recompute_collectives=recompute_collectives,
            sync_boundary=recompute_collectives
            or any(map(self._exchanges, nodes))
            or not self._plan.regathered.isdisjoint(read),
        )

    def _exchanges(self, node: Node) -> bool:
        """Tell whether an operator exchanges tokens or heads, which it does again in the second run."""
        return node.call is not None and exchanges(node.call, self._fused_plan.inputs[node.name], self._plan.mesh.shape)

    def _kept(self, nodes: Sequence[Node], owner: str | None) -> set[str]:
        """Return the kept nodes. Around single operators these are all other nodes that draw no random numbers."""
        if owner is not None:
            return {node.name for node in nodes if node.name in self._keep}
        others = (node for node in nodes if node.name not in self._operators)
        return {node.name for node in others if node.call is not None and not draws(node.call)}
