"""The cost of converting a tensor to another layout in forward, and its gradient back in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np

from ascend_parallel.sharding.graph import TensorMeta
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, SUM, Layout, backward, forward, is_even, shard
from ascend_parallel.sharding.planner.elimination import Costs
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.shortest_path import all_pairs

Layouts = tuple[Layout, ...]


def conversion_costs(
    mesh_shape: tuple[int, ...], costs: MeshCosts
) -> Callable[[TensorMeta, Layouts, Layouts, bool], Costs]:
    """Return a cached function of the seconds of conversions on a mesh of this shape.

    ``matrix(meta, sources, targets, differentiable)[i, j]`` is the time from ``sources[i]`` to ``targets[j]``, with the
    gradient's if differentiable.
    """

    @cache
    def between_all(meta: TensorMeta) -> tuple[dict[Layout, int], Costs]:
        placements = [REPLICATE, SUM, AVERAGE, *(shard(dim) for dim, size in enumerate(meta.shape) if size > 1)]
        layouts = product(placements, repeat=len(mesh_shape))
        even = [layout for layout in layouts if is_even(meta.shape, layout, mesh_shape)]
        seconds = all_pairs(meta.shape, meta.dtype.itemsize, mesh_shape, even, costs)
        return {layout: place for place, layout in enumerate(even)}, seconds

    @cache
    def matrix(meta: TensorMeta, sources: Layouts, targets: Layouts, differentiable: bool) -> Costs:
        index, seconds = between_all(meta)
        rows, columns = ([index[forward(layout)] for layout in layouts] for layouts in (sources, targets))
        chosen = seconds[np.ix_(rows, columns)]
        if differentiable:
            rows, columns = ([index[backward(layout)] for layout in layouts] for layouts in (targets, sources))
            chosen = chosen + seconds[np.ix_(rows, columns)].T
        return chosen

    return matrix
