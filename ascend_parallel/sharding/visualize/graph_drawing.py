"""Draws a graph without cycles in layers: rows by longest path, boxes that do not overlap, arrows between them.

An arrow over several rows has a slot of its own in each row between, so that no box covers the arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import isotonic_regression

GAP, ROW_GAP, LANE = 18.0, 30.0, 8.0
SWEEPS = 16
# The preferred position of a passing arrow counts more than that of a box, so that arrows become straight.
LANE_WEIGHT = 8.0

Arrow = tuple[str, str]
Point = tuple[float, float]
Neighbours = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class Place:
    """The upper left corner and the size of a box, in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Drawing:
    """The places of boxes, the points of arrows, and the size of the drawing."""

    places: Mapping[str, Place]
    arrows: Mapping[Arrow, list[Point]]
    width: float
    height: float


def draw(sizes: Mapping[str, Point], arrows: Iterable[Arrow]) -> Drawing:
    """Return a drawing of boxes of these widths and heights, in an order in which no arrow leads back."""
    arrows = list(dict.fromkeys(arrows))
    rows, chains, neighbours = _rows(list(sizes), arrows)
    widths = {name: sizes[name][0] if name in sizes else LANE for row in rows for name in row}
    _order(rows, neighbours)
    centres = _centres(rows, widths, neighbours)
    left = min((centres[name] - widths[name] / 2 for name in centres), default=0.0)
    places: dict[str, Place] = {}
    tops, y = [], 0.0
    for row in rows:
        height = max((sizes[name][1] for name in row if name in sizes), default=LANE)
        tops.append((y, y + height))
        for name in row:
            if name in sizes:
                width, own = sizes[name]
                places[name] = Place(centres[name] - width / 2 - left, y + (height - own) / 2, width, own)
        y += height + ROW_GAP
    row_of = {name: index for index, row in enumerate(rows) for name in row}
    lines = {
        arrow: _line(chain, places, centres, left, [tops[row_of[name]] for name in chain])
        for arrow, chain in chains.items()
    }
    right = max((centres[name] + widths[name] / 2 - left for name in centres), default=0.0)
    return Drawing(places, lines, right, max(y - ROW_GAP, 0.0))


def _rows(
    names: Sequence[str], arrows: Sequence[Arrow]
) -> tuple[list[list[str]], dict[Arrow, list[str]], Sequence[Neighbours]]:
    """Return the boxes and the slots of passing arrows in every row, each arrow's chain of slots, and all neighbours.

    Neighbours: by box or slot those in the row above, and those in the row below.
    """
    import networkx as nx  # takes long, and training imports this module

    graph = nx.DiGraph(arrows)
    graph.add_nodes_from(names)
    depth = {name: row for row, here in enumerate(nx.topological_generations(graph)) for name in here}
    for name in reversed(list(depth)):  # move a box down to its first reader if the sum of arrow lengths shrinks
        if graph.in_degree(name) < graph.out_degree(name):
            depth[name] = min(depth[target] for target in graph.successors(name)) - 1
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in names:
        rows[depth[name]].append(name)
    chains = {}
    for index, (source, target) in enumerate(arrows):
        chain = [source]
        for row in range(depth[source] + 1, depth[target]):
            chain.append(f"\0{index} {row}")
            rows[row].append(chain[-1])
        chains[source, target] = [*chain, target]
    slots = nx.DiGraph(arrow for chain in chains.values() for arrow in pairwise(chain))
    slots.add_nodes_from(names)
    return rows, chains, (slots.pred, slots.succ)


def _order(rows: list[list[str]], neighbours: Sequence[Neighbours]) -> None:
    """Sort every row by the mean place of its neighbours, in turn those above and those below."""
    for sweep in range(SWEEPS):
        joined = neighbours[sweep % 2]
        for index in range(1, len(rows)) if sweep % 2 == 0 else range(len(rows) - 2, -1, -1):
            fixed = rows[index - 1 if sweep % 2 == 0 else index + 1]
            at = {name: place / max(len(fixed) - 1, 1) for place, name in enumerate(fixed)}
            size = max(len(rows[index]) - 1, 1)
            own = {name: place / size for place, name in enumerate(rows[index])}
            rows[index].sort(key=lambda name: _mean([at[near] for near in joined[name]], own[name]))


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _centres(
    rows: Sequence[Sequence[str]], widths: Mapping[str, float], neighbours: Sequence[Neighbours]
) -> dict[str, float]:
    """Return the horizontal centres of boxes: near the mean of their neighbours, without overlap.

    Centres do not overlap if their distances to the centres of boxes packed side by side never decrease along a row.
    """
    packed = []
    for row in rows:
        spaces = np.array([widths[name] + GAP for name in row])
        packed.append(spaces.cumsum() - spaces / 2 - spaces.sum() / 2)
    centres = {name: at for row, beside in zip(rows, packed, strict=True) for name, at in zip(row, beside, strict=True)}
    for sweep in range(SWEEPS):
        for row, beside in list(zip(rows, packed, strict=True))[:: 1 if sweep % 2 == 0 else -1]:
            wished = [
                _mean([centres[near] for joined in neighbours for near in joined[name]], centres[name]) for name in row
            ]
            straight = [LANE_WEIGHT if widths[name] == LANE else 1.0 for name in row]
            moved = (isotonic_regression(wished - beside, weights=straight).x + beside).tolist()
            centres |= zip(row, moved, strict=True)
    return centres


def _line(
    chain: Sequence[str],
    places: Mapping[str, Place],
    centres: Mapping[str, float],
    left: float,
    rows: Sequence[Point],
) -> list[Point]:
    """Return an arrow's points: from the lower edge of a box, straight through each row, to the upper edge of a box."""
    first, last = places[chain[0]], places[chain[-1]]
    points = [(centres[chain[0]] - left, first.y + first.height)]
    for name, (top, bottom) in list(zip(chain, rows, strict=True))[1:-1]:
        points += [(centres[name] - left, top), (centres[name] - left, bottom)]
    return [*points, (centres[chain[-1]] - left, last.y)]
