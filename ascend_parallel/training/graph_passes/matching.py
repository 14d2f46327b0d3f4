"""A graph's operators looked at from what they give, for passes that put one in the place of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ascend_parallel.sharding.graph import Graph, Node, Ref, Value
from ascend_parallel.sharding.rules.axes import arguments


@dataclass(frozen=True)
class Merged:
    """What comes in the place of a node: operators of which the last has its name.

    gone
        The nodes that nobody reads any more.
    """

    nodes: tuple[Node, ...]
    gone: frozenset[str]


class Reading:
    """A graph, and who reads what."""

    def __init__(self, graph: Graph) -> None:
        """Take a graph."""
        self.graph, self._readers, self._kept = graph, graph.readers(), graph.kept

    def inner(self, value: Value, *targets: Any) -> Node | None:
        """Return the node that gives a tensor, if it calls one of the operators and has one reader."""
        node = self.graph.nodes[value.node]
        return node if self.calls(node, *targets) and self.alone(value) else None

    def calls(self, node: Node, *targets: Any) -> bool:
        """Tell whether a node calls one of the operators, and has no strategy of its own, which would be lost."""
        return node.call is not None and node.call.target in targets and node.mark is None

    def alone(self, value: Value) -> bool:
        """Tell whether a tensor has one reader, and is not returned."""
        return len(self._readers[value]) == 1 and value not in self._kept


def given(node: Node) -> dict[str, Any]:
    """Return a call's arguments by name, defaults included."""
    assert node.call is not None
    return arguments(node.call)


def read(node: Node, argument: Any) -> Value | None:
    """Return the tensor that an argument stands for; None for anything else."""
    return node.inputs[argument.index] if isinstance(argument, Ref) else None


def merge(graph: Graph, found: Mapping[str, Merged]) -> Graph:
    """Put what was found, by node, in the place of the nodes."""
    gone = frozenset[str]().union(*(one.gone for one in found.values()))
    nodes: dict[str, Node] = {}
    for name, node in graph.nodes.items():
        if name in found:
            nodes |= {one.name: one for one in found[name].nodes}
        elif name not in gone:
            nodes[name] = node
    return replace(graph, nodes=nodes)
