"""The cheapest sequence of collectives from one layout of a tensor to another, by shortest paths over layouts.

A step changes the state on one mesh dimension:

    kind            from, to                 each rank
    all_gather      shard, replicate         puts the slices of its line together
    all_to_all      shard, another shard     gives each other rank of its line a block
    reduce_scatter  partial, shard           receives the sum of its slice
    all_reduce      partial, replicate       receives the sum
    slice           replicate, shard         keeps its slice
    hold            replicate, partial       keeps the tensor: for a sum the first rank of the line, the others zeros
    pad             shard, partial           puts zeros around its slice (for avg the slice times the ranks)
    scale           sum, avg and back        multiplies by the ranks of the line, or divides

Where several mesh dimensions cut one tensor dimension, only the last of them can be undone, and a new cut comes after
those that are there: slices stay intervals. Shortest paths make costs a metric: no way round is cheaper than the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from ascend_parallel.sharding.layout import (
    AVERAGE,
    REPLICATE,
    SUM,
    Layout,
    Placement,
    Shape,
    is_even,
    local_shape,
    shard,
)
from ascend_parallel.sharding.redistribute.costs import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    MeshCosts,
    sent,
)

SLICE, HOLD, PAD, SCALE = "slice", "hold", "pad", "scale"
# Of ways that take the same time, those that make no partial states come first.
PREFERRED = ("replicate", "shard", "partial")
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class RedistributeStep:
    """One mesh dimension's state changed.

    nbytes
        Bytes that a rank sends, at most.
    seconds
        Predicted time.
    """

    kind: str
    mesh_dim: int
    source: Placement
    target: Placement
    nbytes: float = 0.0
    seconds: float = 0.0

    def text(self, dim_name: str) -> str:
        """Return the step in words, such as ``all_gather(dim 0, mp) 12.6 MB 0.1 ms``."""
        said = {
            ALL_TO_ALL: f"dim {self.source.dim} to {self.target.dim}",
            SCALE: f"{self.source.op} to {self.target.op}",
        }
        partial = self.source if self.kind == ALL_REDUCE else self.target
        cut = self.target if self.kind in (SLICE, REDUCE_SCATTER) else self.source
        what = said.get(self.kind) or (partial.op if self.kind in (ALL_REDUCE, HOLD) else f"dim {cut.dim}")
        moved = f" {_bytes(self.nbytes)} {self.seconds * 1e3:.2g} ms" if self.nbytes else ""
        return f"{self.kind}({what}, {dim_name}){moved}"


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
        """Bytes that a rank sends, at most."""
        return sum(step.nbytes for step in self.steps)

    def text(self, dim_names: Sequence[str]) -> str:
        """Return the steps in words, with the names of the mesh dimensions."""
        return "; ".join(step.text(dim_names[step.mesh_dim]) for step in self.steps) or "nothing"

    def __str__(self) -> str:
        """Return the steps in words; mesh dimensions are d0, d1, ..."""
        return self.text([f"d{dim}" for dim in range(len(self.source))])


def plan_redistribution(
    shape: Sequence[int], itemsize: int, mesh_shape: Sequence[int], source: Layout, target: Layout, costs: MeshCosts
) -> Redistribution:
    """Return the steps of least predicted time; of equals the fewest, then the first by mesh dimension and state.

    shape, itemsize
        Of the whole tensor, and bytes of one element.
    source, target
        One state per mesh dimension; "partial_grad" counts as replicate. Uneven ones are allowed.

    Raises `ValueError` for layouts that do not fit shape and mesh, and for partial states that do not commute.
    """
    ends = tuple(_tensor_only(layout) for layout in (source, target))
    for layout in ends:
        _check(tuple(shape), tuple(mesh_shape), layout, costs)
    return _planned(tuple(shape), itemsize, tuple(mesh_shape), ends[0], ends[1], costs)


def all_pairs(
    shape: Sequence[int], itemsize: int, mesh_shape: Sequence[int], layouts: Sequence[Layout], costs: MeshCosts
) -> npt.NDArray[np.float64]:
    """Return the seconds of the plan from each of `layouts` (rows) to each of them (columns)."""
    whole, ends = tuple(shape), [_tensor_only(layout) for layout in layouts]
    for layout in ends:
        _check(whole, tuple(mesh_shape), layout, costs)
    space = _Space(whole, itemsize, tuple(mesh_shape), costs, ends)
    nodes = {layout: index for index, layout in enumerate(space.layouts())}
    seconds = np.full((len(nodes), len(nodes)), np.inf)
    np.fill_diagonal(seconds, 0.0)
    for layout, row in nodes.items():
        for _, after, _, took in space.steps(layout):
            if after in nodes:
                seconds[row, nodes[after]] = took
    for middle in range(len(nodes)):  # Floyd and Warshall's
        np.minimum(seconds, seconds[:, middle, None] + seconds[None, middle], out=seconds)
    places = [nodes[layout] for layout in ends]
    return seconds[np.ix_(places, places)]


@lru_cache(maxsize=65536)
def _planned(
    shape: Shape, itemsize: int, mesh_shape: Shape, source: Layout, target: Layout, costs: MeshCosts
) -> Redistribution:
    """Dijkstra's way from `source` to `target`."""
    space = _Space(shape, itemsize, mesh_shape, costs, [source, target])
    # what orders the ways: seconds, number of steps, the steps' mesh dimensions and states
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
                way = (*names, (dim, PREFERRED.index(after[dim].kind), str(after[dim])))
                heapq.heappush(heap, (seconds + took, count + 1, way, after, (*steps, step)))
    raise AssertionError(f"no way from {source} to {target}")


class _Space:
    """The layouts that a way may go through, and the steps between them."""

    def __init__(
        self, shape: Shape, itemsize: int, mesh_shape: Shape, costs: MeshCosts, ends: Sequence[Layout]
    ) -> None:
        self._shape, self._itemsize, self._mesh_shape, self._costs = shape, itemsize, mesh_shape, costs
        used = {state for layout in ends for state in layout}
        others = {state for state in used if state.kind == "partial"} - {SUM, AVERAGE}
        # An average is passed through only where one is meant: of integers there is none.
        self._partials = [SUM, *([AVERAGE] if AVERAGE in used else []), *sorted(others, key=str)]
        self._shards = [shard(dim) for dim, size in enumerate(shape) if size > 1 or shard(dim) in used]
        # between even layouts only even ones are gone through, so that plans need no padding
        self._even = all(is_even(shape, layout, mesh_shape) for layout in ends)
        self._extents: dict[Layout, Shape] = {}
        self._seconds: dict[tuple[str, float, int], float] = {}

    def layouts(self) -> Iterator[Layout]:
        """Yield all of them."""
        states = [REPLICATE, *self._partials, *self._shards]
        return (layout for layout in product(states, repeat=len(self._mesh_shape)) if self._allowed(layout))

    def steps(self, layout: Layout) -> Iterator[tuple[int, Layout, tuple[str, float], float]]:
        """Yield mesh dimension, layout after, kind and bytes of the whole tensor, and seconds."""
        for dim, state in enumerate(layout):
            later = [other.dim for other in layout[dim + 1 :] if other.kind == "shard"]
            if state.kind == "shard" and state.dim in later:
                continue
            shards = [one for one in self._shards if one.dim not in later]
            for after in [REPLICATE, *self._partials, *shards]:
                kind = _kind(state, after)
                changed = (*layout[:dim], after, *layout[dim + 1 :])
                if kind and self._allowed(changed):
                    nbytes = self._whole(kind, dim, layout, changed)
                    yield dim, changed, (kind, nbytes), self._time(kind, nbytes, dim)

    def _allowed(self, layout: Layout) -> bool:
        if not _commute(layout):
            return False
        return not self._even or is_even(self._shape, layout, self._mesh_shape)

    def _whole(self, kind: str, dim: int, before: Layout, after: Layout) -> float:
        """Return the bytes of the whole tensor over the line: pieces as large as the largest."""
        if kind in (SLICE, HOLD, PAD, SCALE):
            return 0.0
        ranks, own, new = self._mesh_shape[dim], self._extent(before), self._extent(after)
        if kind == ALL_REDUCE:
            return prod(own) * self._itemsize
        if kind == ALL_TO_ALL:
            return ranks * ranks * prod(map(min, own, new)) * self._itemsize
        return ranks * prod(own if kind == ALL_GATHER else new) * self._itemsize

    def _extent(self, layout: Layout) -> Shape:
        if layout not in self._extents:
            self._extents[layout] = local_shape(self._shape, layout, self._mesh_shape, [0] * len(self._mesh_shape))
        return self._extents[layout]

    def _time(self, kind: str, nbytes: float, dim: int) -> float:
        if not nbytes:
            return 0.0
        key = (kind, nbytes, dim)
        if key not in self._seconds:
            self._seconds[key] = self._costs.seconds(*key)
        return self._seconds[key]


def _kind(source: Placement, target: Placement) -> str | None:
    """Return the kind of the step between two states of one mesh dimension, or None if there is none."""
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
    """Tell whether the order in which a layout's partial states are reduced does not matter."""
    ops = {state.op for state in layout if state.kind == "partial"}
    return len(ops) < 2 or ops == {"sum", "avg"}


def _tensor_only(layout: Layout) -> Layout:
    return tuple(REPLICATE if state.kind == "partial_grad" else state for state in layout)


def _check(shape: Shape, mesh_shape: Shape, layout: Layout, costs: MeshCosts) -> None:
    shown = " ".join(map(str, layout))
    if len(layout) != len(mesh_shape) or costs.shape != mesh_shape:
        raise ValueError(f"{shown}: give a state, and costs, for each dimension of a mesh of shape {list(mesh_shape)}")
    if any(state.kind == "shard" and not 0 <= state.dim < len(shape) for state in layout):
        raise ValueError(f"{shown}: a tensor of shape {list(shape)} has dimensions 0 to {len(shape) - 1}")
    if not _commute(layout):
        raise ValueError(f"{shown}: partial states of one tensor have to be of one kind, or sum and avg")


def _bytes(count: float) -> str:
    unit, name = next((unit, name) for unit, name in UNITS if count >= unit or unit == 1.0)
    return f"{count / unit:.3g} {name}"
