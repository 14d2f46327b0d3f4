"""What it costs to have a tensor in another layout than it is produced in, forward and for its gradient backward."""

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
    """Costs of conversions on one mesh; remembers those between all layouts of every shape."""

    def __init__(self, mesh_shape: tuple[int, ...], costs: MeshCosts) -> None:
        """Take the size of each mesh dimension and what collectives cost along it."""
        self._mesh_shape, self._costs = mesh_shape, costs
        self._known: dict[TensorMeta, tuple[dict[Layout, int], Costs]] = {}

    def matrix(
        self, meta: TensorMeta, sources: Sequence[Layout], targets: Sequence[Layout], differentiable: bool
    ) -> Costs:
        """Return seconds from each of `sources` to each of `targets`, with the gradient's way back if it has one."""
        index, seconds = self._all(meta)
        ahead = np.ix_([index[forward(one)] for one in sources], [index[forward(one)] for one in targets])
        found = seconds[ahead]
        if differentiable:
            back = np.ix_([index[backward(one)] for one in targets], [index[backward(one)] for one in sources])
            found = found + seconds[back].T
        return found

    def _all(self, meta: TensorMeta) -> tuple[dict[Layout, int], Costs]:
        if meta not in self._known:
            states = [REPLICATE, SUM, AVERAGE, *(shard(dim) for dim, size in enumerate(meta.shape) if size > 1)]
            layouts = [
                layout
                for layout in product(states, repeat=len(self._mesh_shape))
                if is_even(meta.shape, layout, self._mesh_shape)
            ]
            matrix = all_pairs(meta.shape, meta.dtype.itemsize, self._mesh_shape, layouts, self._costs)
            self._known[meta] = {layout: place for place, layout in enumerate(layouts)}, matrix
        return self._known[meta]
