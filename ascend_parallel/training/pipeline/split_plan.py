"""Split the plan of a whole model, loss included, into a plan for each stage.

A tensor sent from a stage to the next is an output of the first, in its layout, and an input of the second: each rank
sends its shard to the rank at the same place of the next stage's mesh. A tensor that a later stage reads is passed
through the stages between. Gradients return along the same ranks.

Meshes of different shapes have a plan each. A tensor that is sent then has a layout on either side, without sums, and
ranks send each other the blocks that the receivers lack (`cross_mesh`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import BUFFER, CALL, INPUT, PARAMETER, Graph, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, local_size
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.training.pipeline.stage_assignment import StageError


@dataclass(frozen=True)
class StagePlan:
    """The plan that the ranks of a stage run.

    plan
        The plan on the stage's mesh. Its graph's inputs are first those of `received`, then those of `inputs`.
    received, sent
        Names of the tensors that come from the stage before and go to the next stage, in the order of both graphs; a
        stage's `sent` is the next stage's `received`.
    inputs
        Names of the whole graph's inputs that the stage reads.
    """

    stage: int
    plan: ShardingPlan
    received: tuple[str, ...]
    sent: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank sends to the next stage in the forward of a micro-batch."""
        metas = {value: self.plan.graph.meta(value) for value in self.plan.returned}
        return sum(
            local_size(meta.shape, self.plan.returned[value], self.plan.mesh.shape) * meta.dtype.itemsize
            for value, meta in metas.items()
        )

    @property
    def parameters(self) -> frozenset[str]:
        """Names, in the model, of the parameters that the stage reads."""
        return frozenset(node.source for node in self.plan.graph.nodes.values() if node.kind == PARAMETER)


def split_into_stages(
    plan: ShardingPlan | Sequence[ShardingPlan], assignment: Mapping[str, int], meshes: Sequence[ProcessMesh]
) -> tuple[StagePlan, ...]:
    """Return the plan of each stage.

    plan
        The plan of a model that returns its loss, a mean over the batch; traced with one micro-batch. Or such a plan
        for each stage, all of one graph, if their meshes have different shapes.
    assignment
        The stage of every operator (`assign`, `balanced`).
    meshes
        A mesh for each stage, with the shape and dimension names of its plan's mesh.

    The model may also return a sum and a count (`Losses`). Raises `StageError` for meshes of another shape, a model
    that returns something else, inputs that require gradients, and a buffer that one stage writes and another reads.
    """
    plans = plan_of_each(plan, meshes)
    _check_meshes(plans, meshes, max(assignment.values()) + 1)
    first = plans[0]
    loss = _loss(first, assignment, len(meshes))
    _check_inputs(first)
    _check_buffers(first.graph, assignment)
    mixed = is_mixed(meshes)
    splitters = {id(each): _Splitter(each, assignment, loss, mixed) for each in plans}
    return tuple(
        splitters[id(each)].stage(stage, mesh) for stage, (each, mesh) in enumerate(zip(plans, meshes, strict=True))
    )


def plan_of_each(
    plan: ShardingPlan | Sequence[ShardingPlan], meshes: Sequence[ProcessMesh]
) -> tuple[ShardingPlan, ...]:
    """Return the plan of each mesh; raise `StageError` unless there is one plan, or one for each."""
    plans = (plan,) * len(meshes) if isinstance(plan, ShardingPlan) else tuple(plan)
    if len(plans) != len(meshes):
        raise StageError(f"{len(plans)} plans for {len(meshes)} meshes: give one plan, or a plan for each mesh")
    return plans


def is_mixed(meshes: Sequence[ProcessMesh]) -> bool:
    """Tell whether the meshes have different shapes."""
    return len({mesh.shape for mesh in meshes}) > 1


def shared_parameters(parts: Sequence[StagePlan]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages read, each with these stages."""
    names = sorted(frozenset().union(*(part.parameters for part in parts)))
    readers = {name: tuple(part.stage for part in parts if name in part.parameters) for name in names}
    return {name: stages for name, stages in readers.items() if len(stages) > 1}


class _Splitter:
    """The whole plan, and the stages between which each tensor is sent."""

    def __init__(self, plan: ShardingPlan, assignment: Mapping[str, int], loss: Value, mixed: bool) -> None:
        self._plan, self._graph, self._assignment, self._mixed = plan, plan.graph, assignment, mixed
        self._readers = self._graph.readers()
        self._last = assignment[loss.node]
        self._returned = self._graph.returned
        self._inputs = [node.name for node in self._graph.inputs]
        self._sent: dict[Value, tuple[int, Layout]] = {}  # the last stage that reads the tensor, its layout when sent
        for value, readers in self._readers.items():
            last = max((assignment[name] for name, _ in readers), default=-1)
            if value.node in assignment and last > assignment[value.node]:
                self._sent[value] = last, self._layout(value)
        for value in self._graph.kept & set(self._returned):  # a count of an earlier stage is sent to the last stage
            if assignment.get(value.node, self._last) < self._last:
                self._sent[value] = self._last, self._layout(value)

    def stage(self, stage: int, mesh: ProcessMesh) -> StagePlan:
        """Return a stage's plan."""
        received = [value for value, (last, _) in self._sent.items() if self._stage_of(value) < stage <= last]
        sent = [value for value, (last, _) in self._sent.items() if self._stage_of(value) <= stage < last]
        here = {value: Value(_name(value)) for value in received}
        graph, plan = self._part(stage, here, sent), self._plan
        values = {value for node in graph.nodes.values() for value in node.values}
        layouts = {value: layout for value, layout in plan.layouts.items() if value in values}
        layouts |= {new: self._sent[value][1] for value, new in here.items()}
        shared = {here.get(value, value): layout for value, layout in plan.shared_layouts.items()}
        read = {value for node in graph.nodes.values() for value in node.inputs}
        returned = {here.get(value, value): self._sent[value][1] for value in sent}
        part = replace(
            plan,
            graph=graph,
            mesh=mesh,
            layouts=layouts,
            inputs={name: plan.inputs[name] if node.inputs else () for name, node in graph.nodes.items()},
            shared_layouts={
                value: layout for value, layout in shared.items() if value in read and layouts[value] != layout
            },
            differentiable=frozenset(here.get(value, value) for value in plan.differentiable) & values,
            configured={name: pattern for name, pattern in plan.configured.items() if name in graph.nodes},
            single=plan.single & set(graph.nodes),
            returned=returned,
        )
        inputs = tuple(name for name in graph.nodes if name in self._inputs)
        return StagePlan(stage, part, tuple(map(_name, received)), tuple(map(_name, sent)), inputs)

    def _part(self, stage: int, here: Mapping[Value, Value], sent: Sequence[Value]) -> Graph:
        """Return the stage's nodes, after the nodes of received tensors."""
        graph = self._graph
        nodes = {new.node: Node(new.node, INPUT, (graph.meta(value),), source=new.node) for value, new in here.items()}
        own = {name: node for name, node in graph.nodes.items() if self._assignment.get(name) == stage}
        updates = {name: value for name, value in graph.updates.items() if self._assignment[value.node] == stage}
        written = {node.name for node in graph.nodes.values() if node.kind == BUFFER and node.source in updates}
        read = {value.node for node in own.values() for value in node.inputs if value.node not in self._assignment}
        if stage == self._last:
            read |= {value.node for value in self._returned if value.node not in self._assignment}
        for name, node in graph.nodes.items():
            if name in read | written:
                nodes[name] = node
        for name, node in own.items():
            nodes[name] = replace(node, inputs=tuple(here.get(value, value) for value in node.inputs))
        outputs: Any = tuple(here.get(value, value) for value in sent)
        if stage == self._last:
            outputs = pytree.tree_map(lambda leaf: here.get(leaf, leaf), graph.outputs)
        return replace(
            graph,
            nodes=nodes,
            outputs=outputs,
            updates=updates,
            with_gradient=frozenset(new.node for value, new in here.items() if value in self._plan.differentiable),
            binding=None,
        )

    def _stage_of(self, value: Value) -> int:
        return self._assignment[value.node]

    def _layout(self, value: Value) -> Layout:
        """Return the layout in which a tensor is sent.

        It is the layout in which the tensor is made. It is the layout that all readers need if the tensor is made as
        partial sums, or if that is fewer bytes to send. Between meshes of different shapes, sums are added up before.
        """
        plan, own = self._plan, self._plan.layouts[value]
        needed = {plan.inputs[name][index] for name, index in self._readers[value]}
        target = plan.shared_layouts.get(value) or (needed.pop() if len(needed) == 1 else own)
        shape, mesh_shape = self._graph.meta(value).shape, plan.mesh.shape
        is_less = local_size(shape, target, mesh_shape) < local_size(shape, own, mesh_shape)
        chosen = target if is_less or any(placement.kind == "partial" for placement in own) else own
        if not self._mixed:
            return chosen
        return tuple(placement if placement.kind == "shard" else REPLICATE for placement in chosen)


def _name(value: Value) -> str:
    return f"{value.node}.{value.index}" if value.index else value.node


def _check_meshes(plans: Sequence[ShardingPlan], meshes: Sequence[ProcessMesh], stages: int) -> None:
    if len(meshes) != stages:
        raise StageError(f"{len(meshes)} meshes for {stages} stages: give a mesh for each")
    for stage, (plan, mesh) in enumerate(zip(plans, meshes, strict=True)):
        if (mesh.shape, mesh.dim_names) != (plan.mesh.shape, plan.mesh.dim_names):
            raise StageError(
                f"the mesh of stage {stage} is {_shape(mesh)}, the plan's is {_shape(plan.mesh)}: give a mesh of the "
                "plan's shape or, for meshes of different shapes, a plan for each"
            )
        if mesh.dim_names != meshes[0].dim_names:
            raise StageError(
                f"the mesh of stage {stage} is {_shape(mesh)}, that of stage 0 {_shape(meshes[0])}: sizes may differ; "
                "name the same dimensions in the same order, of size 1 where a stage has none"
            )
        if list(plan.graph.nodes) != list(plans[0].graph.nodes):
            raise StageError(f"the plan of stage {stage} is of another graph than that of stage 0: plan one graph")


def _shape(mesh: ProcessMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.sizes.items())


def _loss(plan: ShardingPlan, assignment: Mapping[str, int], stages: int) -> Value:
    leaves = _leaves(plan.graph)
    loss = leaves[0] if len(leaves) == 1 or (len(leaves) == 2 and not _differentiable(plan, leaves[1])) else None
    if not isinstance(loss, Value) or plan.graph.meta(loss).shape != () or loss not in plan.differentiable:
        raise StageError(
            "the model returns something else than one loss: trace a model that returns the mean over its batch"
        )
    if assignment.get(loss.node) != stages - 1:
        raise StageError(
            f"the loss is made in stage {assignment.get(loss.node)}, and stages up to {stages - 1} come after it: put "
            "the loss's operators in the last stage"
        )
    return loss


def _leaves(graph: Graph) -> list[Any]:
    return pytree.tree_leaves(graph.outputs, is_leaf=lambda leaf: isinstance(leaf, Value))


def _differentiable(plan: ShardingPlan, count: Any) -> bool:
    return isinstance(count, Value) and (count in plan.differentiable or plan.graph.meta(count).shape != ())


def _check_inputs(plan: ShardingPlan) -> None:
    for node in plan.graph.nodes.values():
        if node.kind == INPUT and Value(node.name) in plan.differentiable:
            raise StageError(
                f"{node.source} was traced with a gradient, and a pipeline computes none for inputs: trace it without"
            )


def _check_buffers(graph: Graph, assignment: Mapping[str, int]) -> None:
    sources = {name: node.source for name, node in graph.nodes.items() if node.kind == BUFFER}
    writers = {name: assignment[value.node] for name, value in graph.updates.items()}
    for node in graph.nodes.values():
        for value in node.inputs if node.kind == CALL else ():
            name = sources.get(value.node, "")
            if name in writers and writers[name] != assignment[node.name]:
                raise StageError(
                    f"stage {writers[name]} writes the buffer {name}, and stage {assignment[node.name]} "
                    f"({node.module or node.name}) reads it: put both in one stage"
                )
