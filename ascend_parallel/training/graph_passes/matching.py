"""Find operators of a graph from their results backwards, and replace them; used by the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ascend_parallel.sharding.graph import Graph, Node, Value
from ascend_parallel.sharding.rules.axes import arguments


@dataclass(frozen=True)
class Replacement:
    """The operators that replace a node; the last of them has the node's name.

    removed
        The nodes that have no readers after the replacement.
    """

    nodes: tuple[Node, ...]
    removed: frozenset[str]


class GraphReader:
    """A graph and the readers of its tensors."""

    def __init__(self, graph: Graph) -> None:
        """Take a graph."""
        self.graph, self._readers, self._kept = graph, graph.readers(), graph.kept

    def producer(self, value: Value, *targets: Any) -> Node | None:
        """Return the node that makes a tensor if it calls one of `targets` and the tensor has a single reader."""
        node = self.graph.nodes[value.node]
        return node if self.calls(node, *targets) and self.has_single_reader(value) else None

    def calls(self, node: Node, *targets: Any) -> bool:
        """Tell whether a node calls one of `targets` and has no strategy of its own, which a pass would lose."""
        return node.call is not None and node.call.target in targets and node.mark is None

    def has_single_reader(self, value: Value) -> bool:
        """Tell whether a tensor has a single reader and is not returned."""
        return len(self._readers[value]) == 1 and value not in self._kept


def call_arguments(node: Node) -> Mapping[str, Any]:
    """Return a call's arguments by name, defaults included."""
    assert node.call is not None
    return arguments(node.call)


def replace_nodes(graph: Graph, match: Callable[[GraphReader, Node], Replacement | None]) -> Graph:
    """Return a graph with each node replaced for which `match` has a replacement; nodes left unread are removed."""
    reader = GraphReader(graph)
    found = {node.name: match(reader, node) for node in graph.nodes.values()}
    replacements = {name: replacement for name, replacement in found.items() if replacement is not None}
    removed = frozenset[str]().union(*(replacement.removed for replacement in replacements.values()))
    nodes: dict[str, Node] = {}
    for name, node in graph.nodes.items():
        if name in replacements:
            nodes |= {new.name: new for new in replacements[name].nodes}
        elif name not in removed:
            nodes[name] = node
    return replace(graph, nodes=nodes)
