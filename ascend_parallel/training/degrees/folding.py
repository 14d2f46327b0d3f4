"""Fold equal layers of a traced graph: the first, one that stands for all in the middle, and the last.

Planning and pricing the three instead of all takes the time of three layers. Equal means: the same operators on the
same shapes, which read the same places of the layer before, and the same tensors from outside of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ascend_parallel.sharding.graph import CALL, Graph, Node, Value
from ascend_parallel.sharding.planner.options import signature
from ascend_parallel.sharding.visualize.repeated_layers import layer_of, repeated

# The layers of a fold: first, middle, last.
KEPT = 3


@dataclass(frozen=True)
class LayerSpan:
    """A layer of the whole model: its path, and its operators as places in `FoldedGraph.sequence`."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class FoldedGraph:
    """A graph of few layers, and the operators of the whole model in running order.

    graph
        The graph with the first, a middle and the last layer; the whole graph if nothing could be folded.
    sequence
        For each operator of the whole model its index among the operators of `graph`; a middle layer's repeat.
    layers
        The patterns of modules that are layers, such as "layers.*"; empty if the model has none.
    depth
        The number of layers of the longest row; 0 without layers.
    spans
        The layers in running order; empty if one runs twice.
    """

    graph: Graph
    sequence: npt.NDArray[np.int64]
    layers: tuple[str, ...]
    depth: int = 0
    spans: tuple[LayerSpan, ...] = ()

    @property
    def most_stages(self) -> int:
        """The most pipeline stages to try: a layer each, or an operator in a model without layers."""
        return self.depth or len(self.sequence)


def fold(graph: Graph, layers: int | None = None) -> FoldedGraph:
    """Fold the longest row of equal layers in `graph`.

    layers
        The number of equal layers of the whole model, if `graph` has been traced with three of them, its last layers.
    """
    calls = [node for node in graph.nodes.values() if node.kind == CALL]
    rows = _rows(graph, calls)
    patterns = tuple(dict.fromkeys(repeated(layer_of(nodes[0].module)) for row in rows for nodes in row))
    row, spans = max(rows, key=len, default=[]), _spans(calls, patterns)
    if layers is not None:
        row = rows[-1] if rows else []
        if len(row) != KEPT:
            raise AssertionError(f"a graph of {KEPT} equal layers has a row of {len(row)}")
        more = layers - KEPT
        return FoldedGraph(graph, _sequence(calls, row[1], more), patterns, layers, _repeated(spans, row[1], more))
    if len(row) <= KEPT or not _foldable(graph, row):
        return FoldedGraph(graph, np.arange(len(calls)), patterns, len(row), spans)
    shorter = _without(graph, row)
    kept = [node for node in shorter.nodes.values() if node.kind == CALL]
    return FoldedGraph(shorter, _sequence(kept, row[1], len(row) - KEPT), patterns, len(row), spans)


def _rows(graph: Graph, calls: Sequence[Node]) -> list[list[list[Node]]]:
    """Return the rows of two or more layers that follow each other and did the same."""
    runs: list[tuple[str, list[Node]]] = []
    for node in calls:
        layer = layer_of(node.module)
        if not runs or runs[-1][0] != layer:
            runs.append((layer, []))
        runs[-1][1].append(node)
    rows: list[list[list[Node]]] = []
    before: object = None
    for layer, nodes in runs:
        kind = (repeated(layer), graph.blocks[layer]) if layer in graph.blocks and len(nodes) > 1 else None
        if kind is not None and kind == before:
            rows[-1].append(nodes)
        elif kind is not None:
            rows.append([nodes])
        before = kind
    return [row for row in rows if len(row) > 1]


def _spans(calls: Sequence[Node], patterns: Sequence[str]) -> tuple[LayerSpan, ...]:
    """Return the layers that a pattern names; none if one runs twice."""
    spans: list[LayerSpan] = []
    for place, node in enumerate(calls):
        path = layer_of(node.module)
        if repeated(path) not in patterns:
            continue
        if spans and (spans[-1].path, spans[-1].stop) == (path, place):
            spans[-1] = replace(spans[-1], stop=place + 1)
        else:
            spans.append(LayerSpan(path, place, place + 1))
    return tuple(spans) if len({span.path for span in spans}) == len(spans) else ()


def _repeated(spans: Sequence[LayerSpan], middle: Sequence[Node], more: int) -> tuple[LayerSpan, ...]:
    """Return the layers with that of `middle` repeated `more` times; the numbers in their paths grow by one."""
    if not spans:
        return ()
    place = next(place for place, span in enumerate(spans) if span.path == layer_of(middle[0].module))
    size = spans[place].stop - spans[place].start

    def later(span: LayerSpan, count: int) -> LayerSpan:
        stem, _, number = span.path.rpartition(".")
        path = f"{stem}.{int(number) + count}" if stem else str(int(number) + count)
        return LayerSpan(path, span.start + count * size, span.stop + count * size)

    again = [later(spans[place], count) for count in range(more + 1)]
    return (*spans[:place], *again, *(later(span, more) for span in spans[place + 1 :]))


def _sequence(calls: Sequence[Node], middle: Sequence[Node], more: int) -> npt.NDArray[np.int64]:
    """Return the indices of `calls`, with those of the layer `middle` repeated `more` times."""
    first = next(index for index, node in enumerate(calls) if node.name == middle[0].name)
    stop = first + len(middle)
    repeats = np.tile(np.arange(first, stop), 1 + more)
    return np.concatenate((np.arange(first), repeats, np.arange(stop, len(calls))))


def _foldable(graph: Graph, row: Sequence[Sequence[Node]]) -> bool:
    """Tell whether layers from the third on read as the second does, and only the next layer reads a middle one."""
    places = [{node.name: place for place, node in enumerate(nodes)} for nodes in row]
    expected = _reads(graph, row[1], places[0], places[1])
    same = all(
        _reads(graph, nodes, before, own) == expected
        for nodes, before, own in zip(row[2:], places[1:], places[2:], strict=False)
    )
    inside = {node.name: layer for layer, nodes in enumerate(row) for node in nodes}
    middle = range(1, len(row) - 1)
    read_after = any(
        inside[value.node] in middle and inside.get(node.name) not in (inside[value.node], inside[value.node] + 1)
        for node in graph.nodes.values()
        for value in node.inputs
        if value.node in inside
    )
    kept = any(inside.get(value.node) in middle for value in graph.kept)
    return same and not read_after and not kept


def _reads(graph: Graph, nodes: Sequence[Node], before: Mapping[str, int], own: Mapping[str, int]) -> list[object]:
    """Return a layer's operators and what they read: places in it and in the layer before, held tensors, others."""
    held: dict[str, int] = {}
    found: list[object] = [signature(node) for node in nodes]
    for node in nodes:
        for value in node.inputs:
            source = graph.nodes[value.node]
            if value.node in own:
                found.append(("own", own[value.node], value.index))
            elif value.node in before:
                found.append(("before", before[value.node], value.index))
            elif source.kind != CALL and layer_of(source.source or ""):
                number = held.setdefault(value.node, len(held))
                found.append((source.kind, number, source.outputs))
            else:
                found.append(("outside", value))
    return found


def _without(graph: Graph, row: Sequence[Sequence[Node]]) -> Graph:
    """Return the graph without the layers after the second and before the last."""
    stands_for = {node.name: like.name for nodes in row[2:-1] for node, like in zip(nodes, row[1], strict=True)}

    def kept(value: Value) -> Value:
        return Value(stands_for.get(value.node, value.node), value.index)

    nodes = {
        name: replace(node, inputs=tuple(map(kept, node.inputs)))
        for name, node in graph.nodes.items()
        if name not in stands_for
    }
    read = {value.node for node in nodes.values() for value in node.inputs} | {value.node for value in graph.kept}
    was_read = {value.node for node in graph.nodes.values() for value in node.inputs}
    nodes = {name: node for name, node in nodes.items() if node.kind == CALL or name in read or name not in was_read}
    return replace(graph, nodes=nodes, calls="the graph is folded")
