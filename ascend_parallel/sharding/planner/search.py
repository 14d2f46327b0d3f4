"""One propagation as choices and costs (elimination.py), and the plan of their solution.

Every node of the graph chooses one of its options (options.py), the configured ones among those that their strategy
leaves. A tensor that is read in another layout than it is produced in is converted, and its gradient on the way back;
one with several readers is converted once to a layout of its own choice, and from there for each reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER, Graph, Node, TensorMeta, Value
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, Layout, cuts
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.compute_cost import seconds as seconds_of
from ascend_parallel.sharding.planner.data_parallel import data_parallel_options
from ascend_parallel.sharding.planner.elimination import AssignmentProblem, Costs, TooWideError, solve
from ascend_parallel.sharding.planner.integer_program import optimum
from ascend_parallel.sharding.planner.op_collectives import op_collective_steps
from ascend_parallel.sharding.planner.operator_strategy import OperatorStrategy, fitting, named_nodes
from ascend_parallel.sharding.planner.options import Option, Options, is_whole, signature, without_parts
from ascend_parallel.sharding.planner.redistribution_cost import Conversions
from ascend_parallel.sharding.planner.sharding_plan import ADAM, ShardingPlan
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

# Seconds per byte a rank holds: decides between equal costs, and nothing else.
TIE_BREAK = 1e-21
# Seconds of a whole operator without gradient from which it is worth a choice.
WORTH_CUTTING = 1e-4
# No mesh dimension, for `is_whole`.
WHOLLY = -1


@dataclass
class Search:
    """One propagation: the problem that it comes to, and the plan of its solution.

    data: the mesh dimension along which what comes from the inputs is cut, and parameters are whole.
    semi_auto: whether what is not configured is whole on the others.
    marked: strategies of nodes that none of `strategies` names.
    """

    graph: Graph
    mesh: ProcessMesh
    strategies: Mapping[str, OperatorStrategy]
    objective: str
    hardware: str
    costs: MeshCosts
    data: str | None = None
    semi_auto: bool = False
    configured: dict[str, str] = field(default_factory=dict)
    marked: Mapping[str, OperatorStrategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the options of every node, and what the strategies leave of them."""
        self._shape = tuple(self.mesh.shape)
        self._conversions = Conversions(self._shape, self.costs)
        self._model = CostModel(find_hardware(self.hardware))
        self._own: dict[object, Costs] = {}
        self._matrices: dict[object, Costs] = {}
        self.differentiable = _differentiable(self.graph)
        options = Options(self._shape)
        self.options: dict[str, Sequence[Option]] = {
            name: options.of(node, self._gradients(node)) for name, node in self.graph.nodes.items()
        }
        for pattern, wanted in self.strategies.items():
            for node in named_nodes(self.graph, pattern):
                self.options[node.name] = fitting(node, self.options[node.name], wanted)
                self.configured[node.name] = pattern
        for name, wanted in self.marked.items():
            if name not in self.configured:
                node = self.graph.nodes[name]
                self.options[name], self.configured[name] = fitting(node, self.options[name], wanted), str(node.mark)
        if self.data is not None:
            data = self.mesh.dim_names.index(self.data)
            self.options = data_parallel_options(self.graph, self.options, self.configured, self.semi_auto, data)
        self._drop_averages()
        self.readers = self.graph.readers()
        self._fixed: set[str] = set()
        self._fix_what_is_free()

    def _drop_averages(self) -> None:
        """Leave out options that read an average over ranks where nothing before can have made one."""
        averaged: set[Value] = set()
        for node in self.graph.nodes.values():
            may = [value in averaged for value in node.inputs]
            self.options[node.name] = [
                option
                for option in self.options[node.name]
                if all(ok or AVERAGE not in one for ok, one in zip(may, option.inputs, strict=True))
            ]
            outputs = (one.outputs for one in self.options[node.name])
            averaged |= {Value(node.name, i) for layouts in outputs for i, one in enumerate(layouts) if AVERAGE in one}

    def _fix_what_is_free(self) -> None:
        """Keep whole what has no gradient and comes from nothing that is cut: every slice of it is free.

        That leaves fewer choices, and keeps what all layers read (rotary angles, masks) from tying them together.
        Nobody reads such a tensor as a part of a sum either.
        """
        for node in self.graph.nodes.values():
            if node.name in self.configured or node.kind == PARAMETER:
                continue
            whole = [value.node in self._fixed for value in node.inputs]
            if any(whole):
                self.options[node.name] = without_parts(self.options[node.name], whole) or self.options[node.name]
            if not is_whole(self.options[node.name][0], WHOLLY, True):
                continue  # semi-automatic: it is cut
            if all(value.node in self._fixed for value in node.inputs) and not self._is_worth_cutting(node):
                self.options[node.name] = self.options[node.name][:1]
                self._fixed.add(node.name)

    def _is_worth_cutting(self, node: Node) -> bool:
        """Tell whether computing it whole takes time that counts: what comes from the model's inputs may be long."""
        if self.objective == "redistribution" or node.kind != CALL:
            return False
        whole, *rest = (self._own_cost(node, option) for option in self.options[node.name])
        return bool(rest) and whole > WORTH_CUTTING

    def problem(self, price: float = 0.0) -> AssignmentProblem:
        """Return the choices and their costs; a shared's name is its tensor's with "shared" before it.

        price: seconds per byte that a rank holds in a training step, on top of all others.
        """
        problem = AssignmentProblem()
        for node in self.graph.nodes.values():
            costs = self._own_costs(node)
            problem.add(node.name, costs + price * self.bytes_held(node) if price else costs)
        for value, readers in self.readers.items():
            if self._has_shared(value, readers):
                self._add_shared(problem, value, readers)
                continue
            for name, index in readers:
                targets = [option.inputs[index] for option in self.options[name]]
                problem.add_pair(value.node, name, self._matrix(value, self.produced(value), targets))
        for value in _leaves(self.graph.outputs):
            matrix = self._matrix(value, self.produced(value), [self._whole])
            problem.own[value.node] = problem.own[value.node] + matrix[:, 0]
        return problem

    def bytes_held(self, node: Node) -> Costs:
        """Return, by option, the bytes that `ShardingPlan.memory` counts for a node."""
        found = np.zeros(len(self.options[node.name]))
        for index, meta in enumerate(node.outputs):
            kept = node.kind == CALL and Value(node.name, index) in self.differentiable
            if kept or node.kind in (PARAMETER, BUFFER):
                times = 2 + ADAM / meta.dtype.itemsize if node.kind == PARAMETER else 1.0
                found += [times * self._held(meta, option.outputs[index]) for option in self.options[node.name]]
        return found

    def solved(self, problem: AssignmentProblem) -> tuple[dict[str, int], float]:
        """Return the best choices, and what no choices cost less than: their own cost, but where that is not proven."""
        try:
            chosen = solve(problem)
            return chosen, problem.cost(chosen)
        except TooWideError:
            found = optimum(problem)
            return found.chosen, found.bound

    def plan(self) -> ShardingPlan:
        """Solve and return the plan."""
        problem = self.problem()
        chosen, bound = self.solved(problem)
        cost = problem.cost(chosen)
        return self.plan_of(problem, chosen, None if cost <= bound * (1 + 1e-9) else bound)

    def plan_of(
        self, problem: AssignmentProblem, chosen: Mapping[str, int], bound: float | None = None
    ) -> ShardingPlan:
        """Return the plan of these choices."""
        picked = {name: self.options[name][chosen[name]] for name in self.graph.nodes}
        layouts = {
            Value(name, index): layout for name, option in picked.items() for index, layout in enumerate(option.outputs)
        }
        via = {
            value: self._shared(value, readers)[chosen[_hub_name(value)]]
            for value, readers in self.readers.items()
            if self._has_shared(value, readers)
        }
        return ShardingPlan(
            graph=self.graph,
            mesh=self.mesh,
            costs=self.costs,
            objective=self.objective,
            layouts=layouts,
            inputs={name: option.inputs for name, option in picked.items()},
            shared_layouts=via,
            differentiable=self.differentiable,
            configured=self.configured,
            single={name for name, options in self.options.items() if len(options) == 1},
            cost=problem.cost(chosen),
            bound=bound,
        )

    @property
    def _whole(self) -> Layout:
        return (REPLICATE,) * len(self._shape)

    def _gradients(self, node: Node) -> tuple[bool, ...]:
        """Tell of each input, and at last of the outputs, whether it has a gradient."""
        outputs = any(Value(node.name, index) in self.differentiable for index in range(len(node.outputs)))
        return (*(value in self.differentiable for value in node.inputs), outputs)

    def _has_shared(self, value: Value, readers: Sequence[tuple[str, int]]) -> bool:
        """Tell whether converting a tensor once for all of its readers can save anything."""
        return len(readers) > 1 and value.node not in self._fixed

    def produced(self, value: Value) -> list[Layout]:
        """Return the layouts in which a tensor can be produced."""
        return [option.outputs[value.index] for option in self.options[value.node]]

    def _add_shared(self, problem: AssignmentProblem, value: Value, readers: Sequence[tuple[str, int]]) -> None:
        """Convert a tensor once for several readers."""
        layouts, shared = self._shared(value, readers), _hub_name(value)
        held = [TIE_BREAK * self._held(self.graph.meta(value), layout) for layout in layouts]
        problem.add(shared, np.array(held))
        problem.add_pair(value.node, shared, self._matrix(value, self.produced(value), layouts))
        for name, index in readers:
            targets = [option.inputs[index] for option in self.options[name]]
            problem.add_pair(shared, name, self._matrix(value, layouts, targets))

    def _shared(self, value: Value, readers: Sequence[tuple[str, int]]) -> list[Layout]:
        """Return the layouts a tensor may be converted to for its readers: what it is produced or read in."""
        found = dict.fromkeys(self.produced(value))
        for name, index in readers:
            found |= dict.fromkeys(option.inputs[index] for option in self.options[name])
        return list(found)

    def _matrix(self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout]) -> Costs:
        meta, differentiable = self.graph.meta(value), value in self.differentiable
        key = (meta, tuple(sources), tuple(targets), differentiable)
        if key not in self._matrices:
            self._matrices[key] = self._conversions.matrix(meta, sources, targets, differentiable)
        return self._matrices[key]

    def _own_costs(self, node: Node) -> Costs:
        options = self.options[node.name]
        key = (signature(node), tuple(options))
        if key not in self._own:
            self._own[key] = np.array([self._own_cost(node, option) for option in options])
        return self._own[key]

    def _own_cost(self, node: Node, option: Option) -> float:
        held = sum(self._held(meta, one) for meta, one in zip(node.outputs, option.outputs, strict=True))
        cost = TIE_BREAK * held
        if node.call is not None:
            cost += sum(step.seconds for step in op_collective_steps(node.call, option.inputs, self.costs))
        if self.objective == "time" and node.call is not None:
            cost += seconds_of(node.call, option, self._shape, self._model)
        return cost

    def _held(self, meta: TensorMeta, layout: Layout) -> float:
        return meta.nbytes / float(np.prod(cuts(layout, self._shape, len(meta.shape))))


def _hub_name(value: Value) -> str:
    return f"via {value.node} {value.index}"


def _leaves(outputs: object) -> list[Value]:
    return [
        one for one in pytree.tree_leaves(outputs, is_leaf=lambda one: isinstance(one, Value)) if isinstance(one, Value)
    ]


def _differentiable(graph: Graph) -> frozenset[Value]:
    """Return the tensors that have a gradient: of floats, from a parameter or an input traced with one on."""
    found: set[Value] = set()
    for node in graph.nodes.values():
        given = node.kind == PARAMETER or node.name in graph.with_gradient
        if given or (node.kind == CALL and any(value in found for value in node.inputs)):
            found |= {
                Value(node.name, index)
                for index, meta in enumerate(node.outputs)
                if meta.dtype.is_floating_point or meta.dtype.is_complex
            }
    return frozenset(found)
