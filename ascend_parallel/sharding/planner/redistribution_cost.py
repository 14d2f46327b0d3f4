"""The cost of converting a tensor to another layout in forward, and its gradient back in backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from ascend_parallel.sharding.graph import TensorMeta
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, SUM, Layout, backward, forward, is_even, shard
from ascend_parallel.sharding.planner.elimination import Costs
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.shortest_path import all_pairs


class Conversions:
    """Costs of conversions on a mesh, cached by tensor shape and dtype for all pairs of layouts."""

    def __init__(self, mesh_shape: tuple[int, ...], costs: MeshCosts) -> None:
        """Take the size of each mesh dimension and the costs of collectives along it."""
        self._mesh_shape, self._costs = mesh_shape, costs
        self._known: dict[TensorMeta, tuple[dict[Layout, int], Costs]] = {}

    def matrix(
        self, meta: TensorMeta, sources: Sequence[Layout], targets: Sequence[Layout], differentiable: bool
    ) -> Costs:
        """Return seconds[i, j] from ``sources[i]`` to ``targets[j]``, with the gradient's if differentiable."""
        index, seconds = self._all(meta)
        rows, columns = ([index[forward(layout)] for layout in layouts] for layouts in (sources, targets))
        costs = seconds[np.ix_(rows, columns)]
        if differentiable:
            rows, columns = ([index[backward(layout)] for layout in layouts] for layouts in (targets, sources))
            costs = costs + seconds[np.ix_(rows, columns)].T
        return costs

    def _all(self, meta: TensorMeta) -> tuple[dict[Layout, int], Costs]:
        if meta not in self._known:
            placements = [REPLICATE, SUM, AVERAGE, *(shard(dim) for dim, size in enumerate(meta.shape) if size > 1)]
            layouts = [
                layout
                for layout in product(placements, repeat=len(self._mesh_shape))
                if is_even(meta.shape, layout, self._mesh_shape)
            ]
            matrix = all_pairs(meta.shape, meta.dtype.itemsize, self._mesh_shape, layouts, self._costs)
            self._known[meta] = {layout: place for place, layout in enumerate(layouts)}, matrix
        return self._known[meta]
