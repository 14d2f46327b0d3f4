"""The bytes of activations that a rank keeps for backward, estimated from the plan before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER, Node, OpCall, Value
from ascend_parallel.sharding.layout import Layout, cuts, forward
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import plan_redistribution
from ascend_parallel.sharding.runtime.autograd_saves import ATTENTION, AutogradSaves, attention_saves, autograd_saves
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.recompute_config import Recompute, calls
from ascend_parallel.sharding.runtime.recompute_regions import VIEWS, CheckpointedBlock, regions

# Of a key: what an operator makes for its backward alone. No layout of a tensor is empty.
INSIDE: Layout = ()
HELD = (PARAMETER, BUFFER)
_Tensors = dict[tuple[Value, Layout], float]


def saved_bytes(plan: ShardingPlan, schedule: Schedule, recompute: Recompute, *, part: bool = False) -> float:
    """Estimate the bytes of activations that a rank keeps from forward to backward.

    The estimate counts what autograd saves of each operator (`autograd_saves`), as laid out on a rank, once. For a
    recompute region it counts the tensors that the region reads and its kept results. It leaves out views, parameters
    and the model's inputs. `part` and errors: see `regions`.
    """
    saved, found = SavedTensors(plan, schedule), regions(plan, schedule, recompute, part=part)
    return sum(saved.kept(found.values()).values())


class SavedTensors:
    """The tensors that autograd saves, with their bytes on a rank."""

    def __init__(self, plan: ShardingPlan, schedule: Schedule) -> None:
        """Take a plan and its schedule."""
        self._plan, self._graph, self._schedule = plan, plan.graph, schedule

    def kept(self, found: Iterable[CheckpointedBlock]) -> _Tensors:
        """Return the tensors kept from forward to backward."""
        found = list(found)
        inside = {name for region in found for name in region.nodes}
        kept = self.by_all(node for node in calls(self._graph) if node.name not in inside)
        for region in found:
            kept |= self.by_region(region)
        return kept

    def by_all(self, nodes: Iterable[Node]) -> _Tensors:
        """Return the tensors that these operators save."""
        found: _Tensors = {}
        for node in nodes:
            found |= self.by_operator(node)
        return found

    def by_operator(self, node: Node) -> _Tensors:
        """Return the tensors that an operator saves."""
        if node.call is None or self._plan.differentiable.isdisjoint(node.values):
            return {}
        saves, found = self._saves(node, node.call), dict[tuple[Value, Layout], float]()
        for place in saves.inputs:
            found |= self._tensor(node.inputs[place], self._schedule.inputs[node.name][place])
        for value in (node.values[place] for place in saves.outputs):
            found |= self._tensor(value, self._schedule.layouts[value])
        if saves.inside:
            found[Value(node.name), INSIDE] = saves.inside * self._share(node)
        return found

    def by_region(self, region: CheckpointedBlock) -> _Tensors:
        """Return the tensors that a recompute region keeps."""
        found: _Tensors = {}
        for value in region.reads:
            found |= self._tensor(value, self._schedule.layouts[value])
        for value in region.read_shared:
            found |= self._tensor(value, self._schedule.shared_layouts[value])
        for name in region.nodes:
            node, kernel = self._graph.nodes[name], self._schedule.kernels.get(name)
            communicates = kernel is not None and kernel.communicates and not region.recompute_collectives
            if name in region.kept or (communicates and name in region.read_inside):
                for value in node.values:
                    found |= self._tensor(value, self._schedule.layouts[value])
            for value, layout in zip(node.inputs, self._schedule.inputs[name], strict=True):
                if not region.recompute_collectives and self._is_sent(value, layout):
                    found |= self._tensor(value, layout)
        return found

    def _saves(self, node: Node, call: OpCall) -> AutogradSaves:
        """Return what autograd saves; of an operator that cannot be asked, all inputs."""
        if operator_name(node) == ATTENTION:
            return attention_saves(call)
        saves = autograd_saves(call, [value in self._plan.differentiable for value in node.inputs])
        return saves or AutogradSaves(frozenset(range(len(call.inputs))), frozenset(), 0)

    def _share(self, node: Node) -> float:
        """Return the share of an operator's work that a rank has: that of its largest activation."""
        read = zip(node.inputs, self._schedule.inputs[node.name], strict=True)
        tensors = [(value, layout) for value, layout in read if self._graph.nodes[value.node].kind not in HELD]
        tensors += [(value, self._schedule.layouts[value]) for value in node.values]
        value, layout = max(tensors, key=lambda tensor: self._graph.meta(tensor[0]).nbytes)
        return self._bytes(value, layout) / (self._graph.meta(value).nbytes or 1)

    def _tensor(self, value: Value, layout: Layout) -> _Tensors:
        """Return a tensor in the layout of its reader, or the base of a view; nothing for inputs and parameters."""
        node = self._graph.nodes[value.node]
        while node.kind == CALL and operator_name(node) in VIEWS.split() and layout == self._schedule.layouts[value]:
            value, layout = node.inputs[0], self._schedule.inputs[node.name][0]
            node = self._graph.nodes[value.node]
        return {(value, forward(layout)): self._bytes(value, layout)} if node.kind == CALL else {}

    def _is_sent(self, value: Value, target: Layout) -> bool:
        """Tell whether the redistribution of a tensor to `target` communicates in forward."""
        meta, source = self._graph.meta(value), self._schedule.shared_layouts.get(value, self._schedule.layouts[value])
        mesh_shape, layouts = tuple(self._plan.mesh.shape), (forward(source), forward(target))
        return plan_redistribution(meta.shape, meta.dtype.itemsize, mesh_shape, *layouts, self._plan.costs).nbytes > 0

    def _bytes(self, value: Value, layout: Layout) -> float:
        meta = self._graph.meta(value)
        return meta.nbytes / prod(cuts(layout, tuple(self._plan.mesh.shape), len(meta.shape)))
