"""The operators that read weights which a strategy shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ascend_parallel.sharding.graph import PARAMETER, Graph
from ascend_parallel.sharding.planner.options import Option


def readers_of_marked_weights(
    graph: Graph, options: Mapping[str, Sequence[Option]], configured: Collection[str]
) -> set[str]:
    """Return the operators whose computing time counts with any objective: they read a weight that is marked.

    The weight lies in slices because the user wants it there. Gathering it, to compute the operator in full on every
    rank, has to be worth that time. Operators that read the weight alone (a transpose, a cast) pass it on.
    """
    weights = (node.name for node in graph.nodes.values() if node.kind == PARAMETER and node.name in configured)
    waiting = [name for name in weights if all(map(_shards, options[name]))]
    found, readers = set[str](), graph.readers()
    while waiting:
        for value in graph.nodes[waiting.pop()].values:
            for reader, _ in readers.get(value, ()):
                alone = len(graph.nodes[reader].inputs) == 1 and reader not in found
                found.add(reader)
                waiting += [reader] if alone else []
    return found


def _shards(option: Option) -> bool:
    return any(placement.kind == "shard" for layout in option.outputs for placement in layout)
