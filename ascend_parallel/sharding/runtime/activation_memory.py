"""How many bytes of activations wait for backward on a rank, told from the plan before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ascend_parallel.sharding.graph import CALL, Node, Value
from ascend_parallel.sharding.layout import Layout, cuts, forward
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import plan_redistribution
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.recompute_config import Recompute, calls
from ascend_parallel.sharding.runtime.recompute_regions import NOTHING_SAVED, VIEWS, Region, regions

# Operators whose backward reads their result, and not what they read.
RESULT_SAVED = "exp log_softmax _log_softmax relu rsqrt sigmoid softmax _softmax sqrt tanh"
_Tensors = dict[tuple[Value, Layout], float]


def saved_bytes(plan: ShardingPlan, schedule: Schedule, recompute: Recompute, *, part: bool = False) -> float:
    """Estimate the bytes of activations that wait on a rank for backward.

    Counted are the operators' inputs and results that their backward reads, as laid out on a rank, each once: of a
    region what it reads, and what is kept of it. Views and parameters are not, nor what is small, such as the
    statistics of norms. `part` and errors as for `regions`.
    """
    count, found = _Saved(plan, schedule), regions(plan, schedule, recompute, part=part)
    return sum(count.kept(found.values()).values())


def again_bytes(plan: ShardingPlan, schedule: Schedule, recompute: Recompute, *, part: bool = False) -> float:
    """Estimate the bytes that come on top in backward, while the largest region has run again."""
    count, found = _Saved(plan, schedule), regions(plan, schedule, recompute, part=part)
    kept, sizes = count.kept(found.values()), [0.0]
    for region in found.values():
        again = count.all(plan.graph.nodes[name] for name in region.nodes)
        sizes.append(sum(size for key, size in again.items() if key not in kept))
    return max(sizes)


class _Saved:
    """Tensors that are saved, with their bytes on a rank."""

    def __init__(self, plan: ShardingPlan, schedule: Schedule) -> None:
        self._plan, self._graph, self._schedule = plan, plan.graph, schedule

    def kept(self, found: Iterable[Region]) -> _Tensors:
        """Return what waits for backward."""
        found = list(found)
        inside = {name for region in found for name in region.nodes}
        kept = self.all(node for node in calls(self._graph) if node.name not in inside)
        for region in found:
            kept |= self.left(region)
        return kept

    def all(self, nodes: Iterable[Node]) -> _Tensors:
        """Return what operators save."""
        found: _Tensors = {}
        for node in nodes:
            found |= self.of(node)
        return found

    def of(self, node: Node) -> _Tensors:
        """Return what an operator saves."""
        name, value = operator_name(node), Value(node.name)
        if name in NOTHING_SAVED.split() or not any(one in self._plan.differentiable for one in self._outputs(node)):
            return {}
        layout = self._schedule.layouts[value]
        if name == "dropout":
            return {(value, forward(layout)): self._bytes(value, layout) / self._graph.meta(value).dtype.itemsize}
        if name == "cross_entropy_loss":  # log-probabilities, as large as what it reads
            of = node.inputs[0]
            return {(value, forward(layout)): self._bytes(of, self._schedule.layouts[of])}
        result = {(value, forward(layout)): self._bytes(value, layout)}
        if name in RESULT_SAVED.split():
            return result
        found = result if name == "scaled_dot_product_attention" else {}
        for one, read in zip(node.inputs, self._schedule.inputs[node.name], strict=True):
            found |= self._tensor(one, read)
        return found

    def left(self, region: Region) -> _Tensors:
        """Return what a region keeps."""
        found: _Tensors = {}
        for value in region.reads:
            found |= self._tensor(value, self._schedule.layouts[value])
        for value in region.read_shared:
            found |= self._tensor(value, self._schedule.shared_layouts[value])
        for name in region.nodes:
            node, kernel = self._graph.nodes[name], self._schedule.kernels.get(name)
            communicates = kernel is not None and kernel.communicates and not region.again
            if name in region.kept or (communicates and name in region.read_again):
                for value in self._outputs(node):
                    found |= self._tensor(value, self._schedule.layouts[value])
            for value, layout in zip(node.inputs, self._schedule.inputs[name], strict=True):
                if not region.again and self._is_sent(value, layout):
                    found |= self._tensor(value, layout)
        return found

    def _tensor(self, value: Value, layout: Layout) -> _Tensors:
        """Return a tensor as it is read, or what it is a view of; nothing for what is given."""
        node = self._graph.nodes[value.node]
        while node.kind == CALL and operator_name(node) in VIEWS.split() and layout == self._schedule.layouts[value]:
            value, layout = node.inputs[0], self._schedule.inputs[node.name][0]
            node = self._graph.nodes[value.node]
        return {(value, forward(layout)): self._bytes(value, layout)} if node.kind == CALL else {}

    def _is_sent(self, value: Value, target: Layout) -> bool:
        """Tell whether bringing a tensor to a layout communicates in forward."""
        meta, source = self._graph.meta(value), self._schedule.shared_layouts.get(value, self._schedule.layouts[value])
        mesh_shape, ways = tuple(self._plan.mesh.shape), (forward(source), forward(target))
        return plan_redistribution(meta.shape, meta.dtype.itemsize, mesh_shape, *ways, self._plan.costs).nbytes > 0

    def _outputs(self, node: Node) -> list[Value]:
        return [Value(node.name, index) for index in range(len(node.outputs))]

    def _bytes(self, value: Value, layout: Layout) -> float:
        meta = self._graph.meta(value)
        return meta.nbytes / prod(cuts(layout, tuple(self._plan.mesh.shape), len(meta.shape)))
