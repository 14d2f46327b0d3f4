"""Batch norms with each rank's own statistics: an option of `propagate`."""

from __future__ import annotations

from dataclasses import replace

from ascend_parallel.sharding.graph import Graph, Node, OpCall
from ascend_parallel.sharding.rules.axes import arguments
from ascend_parallel.sharding.rules.batch_norm import LOCAL, LOCAL_WITHOUT_STATISTICS
from ascend_parallel.sharding.tracing.functionalize import BATCH_NORM, FUNCTIONAL_BATCH_NORM

CHOICES = ("sync", "local")


def with_batch_norms(graph: Graph, statistics: str) -> Graph:
    """Return the graph; with statistics "local" its batch norms of a training normalise each rank's part by itself.

    Raises `ValueError` for other statistics than "sync" and "local".
    """
    if statistics not in CHOICES:
        raise ValueError(f"batch_norm={statistics!r}: give one of {', '.join(CHOICES)}")
    if statistics == "sync":
        return graph
    return replace(graph, nodes={name: _local(node) for name, node in graph.nodes.items()})


def has_local_batch_norms(graph: Graph) -> bool:
    """Tell whether a graph has batch norms with each rank's own statistics."""
    targets = (node.call.target for node in graph.nodes.values() if node.call is not None)
    return any(target in (LOCAL, LOCAL_WITHOUT_STATISTICS) for target in targets)


def _local(node: Node) -> Node:
    call = node.call
    if call is None or call.target not in (FUNCTIONAL_BATCH_NORM, BATCH_NORM) or not arguments(call)["training"]:
        return node
    if call.target is FUNCTIONAL_BATCH_NORM:
        return replace(node, call=replace(call, target=LOCAL))
    named = arguments(call)
    args = (named["input"], named["weight"], named["bias"], named["eps"])
    return replace(node, call=OpCall(LOCAL_WITHOUT_STATISTICS, args, {}, call.inputs, call.outputs))
