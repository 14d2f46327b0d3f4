"""The seconds between the layouts of a tensor's producer and those of its readers, for all pairs of options.

A change of layout costs its collectives, forward and backward, as the cheapest redistribution. Where one of them runs
together with a matmul at either end (overlapped_matmul.py), it costs what stays exposed beside the matmul. That depends
on the two options alone, so the search stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.sharding.graph import TensorMeta
from ascend_parallel.sharding.layout import (
    AVERAGE,
    PARTIAL_GRAD,
    REPLICATE,
    SUM,
    Layout,
    Placement,
    backward,
    forward,
    is_even,
    shard,
    with_placement,
)
from ascend_parallel.sharding.planner.elimination import Costs
from ascend_parallel.sharding.planner.gradient_sums import bucket_seconds, summed_dims
from ascend_parallel.sharding.planner.overlapped_matmul import ColumnGroup, ExposedCosts
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.shortest_path import all_pairs


@dataclass(frozen=True)
class FusibleMatmul:
    """A matmul that can run with the collective of a tensor beside it.

    shape
        A rank's call; of a column matmul with all rows of x.
    placements
        Along `mesh_dim`: those to which it can sum its output, or from which it can gather its input.
    """

    shape: LayerShape
    mesh_dim: int
    placements: frozenset[Placement]


@dataclass(frozen=True)
class GatheredGroup:
    """All matmuls that read a tensor, as one: the tensor is `placement` along a mesh dimension before their gather."""

    mesh_dim: int
    placement: Placement
    columns: ColumnGroup


@dataclass(frozen=True)
class EdgeEnd:
    """A layout in which a tensor is produced or read, and the matmuls at this end that may run with its collectives.

    matmuls
        At most one for each mesh dimension, in their order.
    group
        The matmuls that read the tensor, if they run as one. They then cannot read it otherwise.
    """

    layout: Layout
    matmuls: tuple[FusibleMatmul, ...] = ()
    group: GatheredGroup | None = None


class EdgeCosts:
    """Costs between layouts on a mesh; what tensors of equal shape share is computed once."""

    def __init__(self, mesh_shape: tuple[int, ...], costs: MeshCosts, exposed: ExposedCosts | None) -> None:
        """Take the costs of collectives, and those of matmuls with a collective; None: none run together."""
        self._mesh_shape, self._costs, self._exposed = mesh_shape, costs, exposed
        self._between_all = cache(self._between_all_of)

    def matrix(
        self, meta: TensorMeta, sources: Sequence[EdgeEnd], targets: Sequence[EdgeEnd], differentiable: bool
    ) -> Costs:
        """Return the seconds ``[sources, targets]`` of a tensor's conversions, with its gradient's if there is one."""
        edge = _Edge(self._between_all(meta), targets, differentiable, self._exposed)
        if self._exposed is None or not any(end.matmuls for end in (*sources, *targets)):
            return edge.plain([source.layout for source in sources])
        return _without_escapes(np.array([edge.of(source) for source in sources]), targets)

    def sums(
        self, meta: TensorMeta, sources: Sequence[Layout], targets: Sequence[Layout], bucket: float
    ) -> tuple[Costs, Costs]:
        """Return the seconds ``[sources, targets]`` of sums of a parameter's gradient: alone, and in buckets.

        bucket: bytes of a bucket; each of its bytes takes an equal share of its seconds. With more bytes than any
        bucket has, the seconds are a lower bound.
        """
        index, between = self._between_all(meta)
        alone, shared = np.zeros((2, len(sources), len(targets)))
        for row, source in enumerate(sources):
            nbytes = meta.local_bytes(source, self._mesh_shape)
            whole = max(nbytes, bucket)
            for column, target in enumerate(targets):
                dims = summed_dims(source, target)
                if dims:
                    alone[row, column] = between[index[backward(target)], index[backward(source)]]
                    shared[row, column] = bucket_seconds(self._costs, whole, dims) * nbytes / whole
        return alone, shared

    def _between_all_of(self, meta: TensorMeta) -> tuple[dict[Layout, int], Costs]:
        placements = [REPLICATE, SUM, AVERAGE, *(shard(dim) for dim, size in enumerate(meta.shape) if size > 1)]
        layouts = product(placements, repeat=len(self._mesh_shape))
        even = [layout for layout in layouts if is_even(meta.shape, layout, self._mesh_shape)]
        seconds = all_pairs(meta.shape, meta.dtype.itemsize, self._mesh_shape, even, self._costs)
        return {layout: place for place, layout in enumerate(even)}, seconds


class _Edge:
    """The costs of one tensor to the same targets."""

    def __init__(
        self,
        between: tuple[dict[Layout, int], Costs],
        targets: Sequence[EdgeEnd],
        differentiable: bool,
        exposed: ExposedCosts | None,
    ) -> None:
        self._index, self._seconds = between
        self._targets, self._differentiable, self._exposed = targets, differentiable, exposed
        self._to = self._places([forward(target.layout) for target in targets])
        self._back = self._places([backward(target.layout) for target in targets]) if differentiable else None
        self._from = cache(self._from_layout)

    def plain(self, sources: Sequence[Layout]) -> Costs:
        """Return the seconds ``[sources, targets]`` of the collectives alone."""
        chosen = self._seconds[np.ix_(self._places(list(map(forward, sources))), self._to)]
        if self._back is not None:
            chosen = chosen + self._seconds[np.ix_(self._back, self._places(list(map(backward, sources))))].T
        return chosen

    def of(self, source: EdgeEnd) -> Costs:
        """Return the seconds from a source to each target: what its matmul can sum, the matmul sums first."""
        costs = self._from(source.layout)
        for matmul in source.matmuls[:1]:
            costs, dim = costs.copy(), matmul.mesh_dim
            for placement in matmul.placements:
                summed = np.array([_same(target.layout[dim], placement) for target in self._targets])
                if summed.any():
                    rest = self._from(with_placement(source.layout, dim, placement))
                    costs[summed] = (rest + self._seconds_of(matmul, placement))[summed]
        return costs

    def _from_layout(self, layout: Layout) -> Costs:
        """Return the seconds from a layout to each target: what its matmul can gather, the matmul gathers last."""
        costs: Costs = self.plain([layout])[0]
        for place, target in enumerate(self._targets):
            for matmul in target.matmuls:
                dim, placement = matmul.mesh_dim, layout[matmul.mesh_dim]
                if placement.kind == "partial":  # the sum comes first; that of the gradient runs with the matmul
                    placement = REPLICATE
                if placement in matmul.placements:
                    before = with_placement(target.layout, dim, placement)
                    costs[place] = self._one(layout, before) + self._seconds_of(matmul, placement)
                    break
            else:
                if target.group is not None:
                    costs[place] = np.inf
        return costs

    def _one(self, source: Layout, target: Layout) -> float:
        index, seconds = self._index, self._seconds
        cost = float(seconds[index[forward(source)], index[forward(target)]])
        if self._differentiable:
            cost += float(seconds[index[backward(target)], index[backward(source)]])
        return cost

    def _seconds_of(self, matmul: FusibleMatmul, placement: Placement) -> float:
        assert self._exposed is not None
        return self._exposed.seconds(matmul.shape, matmul.mesh_dim, placement.kind == "shard", self._differentiable)

    def _places(self, layouts: Sequence[Layout]) -> list[int]:
        return [self._index[layout] for layout in layouts]


def _without_escapes(costs: Costs, targets: Sequence[EdgeEnd]) -> Costs:
    """Return the costs, with only what will run where matmuls can run as one: no price may promise otherwise.

    They run with the gather along the first mesh dimension that they can. They do so also where their chunks cost more
    than they hide: the conversion for several readers is as dear as that of a group in the same layout.
    """
    groups: dict[Layout, list[int]] = {}
    first: dict[ColumnGroup, list[int]] = {}
    for place, target in enumerate(targets):
        if target.group is not None:
            groups.setdefault(target.layout, []).append(place)
            for earlier in first.setdefault(target.group.columns, []):
                before = targets[earlier].group
                if before is not None and before.mesh_dim < target.group.mesh_dim:
                    costs[np.isfinite(costs[:, earlier]), place] = np.inf
            first[target.group.columns].append(place)
    for place, target in enumerate(targets):
        if target.group is None and target.layout in groups:
            least = costs[:, groups[target.layout]].min(axis=1)
            costs[:, place] = np.where(np.isfinite(least), np.maximum(costs[:, place], least), costs[:, place])
    return costs


def _same(target: Placement, placement: Placement) -> bool:
    """Tell whether a tensor that is summed to `placement` is then read as `target`; R* is R in forward."""
    return (REPLICATE if target == PARTIAL_GRAD else target) == placement
