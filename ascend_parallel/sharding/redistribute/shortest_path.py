"""The cheapest sequence of collectives from one layout of a tensor to another, by shortest paths over layouts.

A step changes the placement on one mesh dimension:

    kind            from, to                 each rank
    all_gather      shard, replicate         concatenates the slices of its line
    all_to_all      shard, another shard     sends a block to each other rank of its line
    reduce_scatter  partial, shard           receives the sum of its slice
    all_reduce      partial, replicate       receives the sum
    slice           replicate, shard         keeps its slice
    hold            replicate, partial       keeps the tensor; for a sum only the first rank of the line, others zeros
    pad             shard, partial           pads its slice with zeros (for avg the slice times the ranks)
    scale           sum to avg, or back      multiplies or divides by the ranks of the line

Where several mesh dimensions shard one tensor dimension, only the last of them can be undone, and a new shard comes
after the existing shards: slices stay intervals. Shortest paths make costs a metric: no detour is cheaper than a plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from ascend_parallel.sharding.layout import (
    AVERAGE,
    REPLICATE,
    SUM,
    Layout,
    Placement,
    Shape,
    forward,
    is_even,
    largest_local_shape,
    shard,
    text,
    with_placement,
)
from ascend_parallel.sharding.redistribute.costs import MeshCosts, sent
from ascend_parallel.text import size_of

SLICE, HOLD, PAD, SCALE = "slice", "hold", "pad", "scale"
# Among paths of the same time, paths without partial placements come first.
PREFERRED = ("replicate", "shard", "partial")


@dataclass(frozen=True)
class RedistributeStep:
    """A change of the placement on one mesh dimension.

    nbytes
        The most bytes that a rank sends.
    seconds
        Predicted time.
    backward
        Whether it is a collective of an operator's backward.
    """

    kind: str
    mesh_dim: int
    source: Placement
    target: Placement
    nbytes: float = 0.0
    seconds: float = 0.0
    backward: bool = False

    def text(self, dim_name: str) -> str:
        """Return the step as text, such as ``all_gather(dim 0, mp) 12.6 MB 0.1 ms``."""
        changes = {
            ALL_TO_ALL: f"dim {self.source.dim} to {self.target.dim}",
            SCALE: f"{self.source.op} to {self.target.op}",
        }
        partial = self.source if self.kind == ALL_REDUCE else self.target
        sharded = self.target if self.kind in (SLICE, REDUCE_SCATTER) else self.source
        change = changes.get(self.kind) or (partial.op if self.kind in (ALL_REDUCE, HOLD) else f"dim {sharded.dim}")
        cost = f" {size_of(self.nbytes)} {self.seconds * 1e3:.2g} ms" if self.nbytes else ""
        return f"{self.kind}({change}, {dim_name}){cost}"


@dataclass(frozen=True)
class Redistribution:
    """The steps from one layout to another, in order."""

    source: Layout
    target: Layout
    steps: tuple[RedistributeStep, ...]

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return sum(step.seconds for step in self.steps)

    @property
    def nbytes(self) -> float:
        """The most bytes that a rank sends."""
        return sum(step.nbytes for step in self.steps)

    def text(self, dim_names: Sequence[str]) -> str:
        """Return the steps as text, with the names of the mesh dimensions."""
        return "; ".join(step.text(dim_names[step.mesh_dim]) for step in self.steps) or "nothing"

    def __str__(self) -> str:
        """Return the steps as text; mesh dimensions are d0, d1, ..."""
        return self.text([f"d{dim}" for dim in range(len(self.source))])


def plan_redistribution(
    shape: Sequence[int], itemsize: int, mesh_shape: Sequence[int], source: Layout, target: Layout, costs: MeshCosts
) -> Redistribution:
    """Return the steps of least predicted time; ties go to the fewest steps, then by mesh dimension and placement.

    shape, itemsize
        The shape of the whole tensor, and the bytes of an element.
    source, target
        One placement per mesh dimension; "partial_grad" counts as replicate. Uneven layouts are allowed.

    Raises `ValueError` for layouts that do not fit shape and mesh, and for partial placements that do not commute.
    """
    ends = tuple(forward(layout) for layout in (source, target))
    for layout in ends:
        _check(tuple(shape), tuple(mesh_shape), layout, costs)
    return _planned(tuple(shape), itemsize, tuple(mesh_shape), ends[0], ends[1], costs)


def all_pairs(
    shape: Sequence[int], itemsize: int, mesh_shape: Sequence[int], layouts: Sequence[Layout], costs: MeshCosts
) -> npt.NDArray[np.float64]:
    """Return seconds[i, j], the time of the redistribution from ``layouts[i]`` to ``layouts[j]``."""
    whole, ends = tuple(shape), [forward(layout) for layout in layouts]
    for layout in ends:
        _check(whole, tuple(mesh_shape), layout, costs)
    space = _LayoutSpace(whole, itemsize, tuple(mesh_shape), costs, ends)
    nodes = {layout: index for index, layout in enumerate(space.layouts())}
    seconds = np.full((len(nodes), len(nodes)), np.inf)
    np.fill_diagonal(seconds, 0.0)
    for layout, row in nodes.items():
        for _, after, _, took in space.steps(layout):
            if after in nodes:
                seconds[row, nodes[after]] = took
    for middle in range(len(nodes)):  # Floyd-Warshall
        np.minimum(seconds, seconds[:, middle, None] + seconds[None, middle], out=seconds)
    places = [nodes[layout] for layout in ends]
    return seconds[np.ix_(places, places)]


@lru_cache(maxsize=65536)
def _planned(
    shape: Shape, itemsize: int, mesh_shape: Shape, source: Layout, target: Layout, costs: MeshCosts
) -> Redistribution:
    """Return the shortest path from `source` to `target`, by Dijkstra's algorithm."""
    space = _LayoutSpace(shape, itemsize, mesh_shape, costs, [source, target])
    # paths are ordered by seconds, number of steps, the steps' mesh dimensions and placements
    heap: list[tuple[float, int, tuple[tuple[int, int, str], ...], Layout, tuple[RedistributeStep, ...]]] = [
        (0.0, 0, (), source, ())
    ]
    done = set()
    while heap:
        seconds, count, names, layout, steps = heapq.heappop(heap)
        if layout == target:
            return Redistribution(source, target, steps)
        if layout in done:
            continue
        done.add(layout)
        for dim, after, (kind, nbytes), took in space.steps(layout):
            if after not in done:
                step = RedistributeStep(
                    kind, dim, layout[dim], after[dim], sent(kind, nbytes, mesh_shape[dim]) if nbytes else 0.0, took
                )
                path = (*names, (dim, PREFERRED.index(after[dim].kind), str(after[dim])))
                heapq.heappush(heap, (seconds + took, count + 1, path, after, (*steps, step)))
    raise AssertionError(f"no path from {source} to {target}")


class _LayoutSpace:
    """The layouts that a path may pass through, and the steps between them."""

    def __init__(
        self, shape: Shape, itemsize: int, mesh_shape: Shape, costs: MeshCosts, ends: Sequence[Layout]
    ) -> None:
        self._shape, self._itemsize, self._mesh_shape = shape, itemsize, mesh_shape
        used = {placement for layout in ends for placement in layout}
        extremes = {placement for placement in used if placement.kind == "partial"} - {SUM, AVERAGE}
        # Paths pass through an average only if an end has an average: integers have none.
        self._partials = [SUM, *([AVERAGE] if AVERAGE in used else []), *sorted(extremes, key=str)]
        self._shards = [shard(dim) for dim, size in enumerate(shape) if size > 1 or shard(dim) in used]
        # paths between even layouts pass only through even layouts, so that they need no padding
        self._even = all(is_even(shape, layout, mesh_shape) for layout in ends)
        self._extent = cache(lambda layout: largest_local_shape(shape, layout, mesh_shape))
        self._time = cache(lambda kind, nbytes, dim: costs.seconds(kind, nbytes, dim) if nbytes else 0.0)

    def layouts(self) -> Iterator[Layout]:
        placements = [REPLICATE, *self._partials, *self._shards]
        return (layout for layout in product(placements, repeat=len(self._mesh_shape)) if self._allowed(layout))

    def steps(self, layout: Layout) -> Iterator[tuple[int, Layout, tuple[str, float], float]]:
        """Yield (mesh dimension, layout after the step, (kind, bytes of the whole tensor), seconds)."""
        for dim, placement in enumerate(layout):
            later = [inner.dim for inner in layout[dim + 1 :] if inner.kind == "shard"]
            if placement.kind == "shard" and placement.dim in later:
                continue
            shards = [target for target in self._shards if target.dim not in later]
            for after in [REPLICATE, *self._partials, *shards]:
                kind = _kind(placement, after)
                changed = with_placement(layout, dim, after)
                if kind and self._allowed(changed):
                    nbytes = self._whole(kind, dim, layout, changed)
                    yield dim, changed, (kind, nbytes), self._time(kind, nbytes, dim)

    def _allowed(self, layout: Layout) -> bool:
        if not _commute(layout):
            return False
        return not self._even or is_even(self._shape, layout, self._mesh_shape)

    def _whole(self, kind: str, dim: int, before: Layout, after: Layout) -> float:
        """Return the bytes of the whole tensor over the line, with all slices as large as the largest slice."""
        if kind in (SLICE, HOLD, PAD, SCALE):
            return 0.0
        ranks, own, new = self._mesh_shape[dim], self._extent(before), self._extent(after)
        if kind == ALL_REDUCE:
            return prod(own) * self._itemsize
        if kind == ALL_TO_ALL:
            return ranks * ranks * prod(map(min, own, new)) * self._itemsize
        return ranks * prod(own if kind == ALL_GATHER else new) * self._itemsize


def _kind(source: Placement, target: Placement) -> str | None:
    """Return the kind of the step between two placements on a mesh dimension, or None if no single step does it."""
    if source == target:
        return None
    kinds = {
        ("replicate", "shard"): SLICE,
        ("replicate", "partial"): HOLD,
        ("shard", "replicate"): ALL_GATHER,
        ("shard", "shard"): ALL_TO_ALL,
        ("shard", "partial"): PAD,
        ("partial", "replicate"): ALL_REDUCE,
        ("partial", "shard"): REDUCE_SCATTER,
    }
    if source.kind == target.kind == "partial":
        return SCALE if {source.op, target.op} == {"sum", "avg"} else None
    return kinds[source.kind, target.kind]


def _commute(layout: Layout) -> bool:
    """Tell whether a layout's partial placements can be reduced in any order."""
    ops = {placement.op for placement in layout if placement.kind == "partial"}
    return len(ops) < 2 or ops == {"sum", "avg"}


def _check(shape: Shape, mesh_shape: Shape, layout: Layout, costs: MeshCosts) -> None:
    shown = text(layout)
    if len(layout) != len(mesh_shape) or costs.shape != mesh_shape:
        raise ValueError(
            f"{shown}: give a placement, and costs, for each dimension of a mesh of shape {list(mesh_shape)}"
        )
    if any(placement.kind == "shard" and not 0 <= placement.dim < len(shape) for placement in layout):
        raise ValueError(f"{shown}: a tensor of shape {list(shape)} has dimensions 0 to {len(shape) - 1}")
    if not _commute(layout):
        raise ValueError(f"{shown}: the partial placements of a tensor have to be of one kind, or sum and avg")
