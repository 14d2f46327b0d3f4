"""A call of a torch function on DTensors as a program of this rank: which operators it runs, and in which layouts.

The function is traced alone, with whole tensors, to a small graph. For each of its operators in turn, the option of its
rule is taken that sends the least in forward from the layouts that its tensors have, and among those the fastest: by
the same rules and costs as a plan for a whole model, but without a view of the calls to come. The compiler of such a
plan makes the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CONSTANT, INPUT, Graph, Node, Ref, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout
from ascend_parallel.sharding.marked.torch_call import TorchCall
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import op_collective_steps, seconds
from ascend_parallel.sharding.planner.options import WHOLE, Option, Options
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution, plan_differentiable
from ascend_parallel.sharding.redistribute.reshard import costs_of, hardware_of
from ascend_parallel.sharding.rules.axes import is_float
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.compute_instructions import Run
from ascend_parallel.sharding.runtime.instructions import Holder, Program, Step
from ascend_parallel.sharding.runtime.rank_plan import RankPlan
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

TENSOR = "t"  # tensors of a traced function are its buffers t0, t1, ...


@dataclass(frozen=True)
class Argument:
    """A DTensor among a call's arguments: the whole tensor, and the layout in which it is held."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    differentiable: bool


@dataclass(frozen=True)
class FunctionPlan:
    """A compiled call.

    program
        What this rank runs: from its parts of the arguments, and `constants`, to its parts of `made`.
    arguments
        For each argument its `Value`, and the layout in which it is read, which is how its gradient is laid out.
    made
        The tensors that the function returns or writes and that are no arguments, in `layouts`, of `shapes`.
    results
        What the function returns, with a `Value` for each tensor.
    updates
        The new values of arguments that the function writes to, by the argument's index.
    views
        For each value that is a view of an argument, on one card: the argument's index.
    constants
        Whole tensors that the function made of its other arguments.
    """

    program: Program
    arguments: Mapping[Value, Layout]
    made: tuple[Value, ...]
    layouts: Mapping[Value, Layout]
    shapes: Mapping[Value, tuple[int, ...]]
    results: tuple[Any, ...]
    results_spec: pytree.TreeSpec
    updates: Mapping[int, Value]
    views: Mapping[Value, int]
    constants: Mapping[Value, torch.Tensor]

    @cached_property
    def draws(self) -> bool:
        """Whether the call draws random numbers."""
        return any(isinstance(each, Run) and each.local.draws for each in self.program.instructions)

    def run(self, locals_: Sequence[torch.Tensor], stream: str) -> dict[Value, torch.Tensor]:
        """Return this rank's part of each tensor of `made`, from those of the arguments; differentiable.

        stream: names the random numbers; the same on all ranks.
        """
        values = {**self.constants, **dict(zip(self.arguments, locals_, strict=True))}
        given = [values[self.program.registers[register].value] for register in self.program.inputs]
        nothing_held = cast(Holder, None)  # all tensors are inputs
        return dict(zip(self.made, self.program.run(given, Step(nothing_held, stream)), strict=True))


class _TracedCall(torch.nn.Module):
    """A call as a model, so that it can be traced."""

    def __init__(self, call: TorchCall, arguments: Sequence[Argument], device: str) -> None:
        super().__init__()
        self._call, self._names = call, [f"{TENSOR}{index}" for index in range(len(arguments))]
        with FakeTensorMode():
            for name, argument in zip(self._names, arguments, strict=True):
                self.register_buffer(name, torch.empty(argument.shape, dtype=argument.dtype, device=device))

    def forward(self) -> Any:
        return self._call.on([getattr(self, name) for name in self._names])


def plan_function(
    call: TorchCall,
    arguments: Sequence[Argument],
    mesh: ProcessMesh,
    coordinate: tuple[int, ...],
) -> FunctionPlan:
    """Return the plan of a call, for the rank at `coordinate`.

    Raises `TraceError` for a function that cannot be traced: its result's shape depends on values, or is no tensor.
    """
    device = mesh.device_mesh().device_type
    graph = trace(_TracedCall(call, arguments, device).eval(), (), twice=False)
    return _Planner(graph, arguments, mesh).plan(coordinate)


class _Planner:
    """Chooses the layouts of a function's operators, one after the other."""

    def __init__(self, graph: Graph, arguments: Sequence[Argument], mesh: ProcessMesh) -> None:
        self._graph, self._arguments, self._mesh = graph, arguments, mesh
        self._shape = mesh.shape
        self._costs, self._model = costs_of(mesh), CostModel(find_hardware(hardware_of(mesh)))
        self._options = Options(self._shape)
        held = [node for node in graph.nodes.values() if node.call is None]
        self._places = {
            Value(node.name): int(node.source.removeprefix(TENSOR)) for node in held if node.source.startswith(TENSOR)
        }
        whole = (REPLICATE,) * mesh.ndim
        self._layouts = dict.fromkeys((Value(node.name) for node in held), whole)
        self._layouts |= {value: arguments[place].layout for value, place in self._places.items()}
        self._differentiable = {value for value, place in self._places.items() if arguments[place].differentiable}

    def plan(self, coordinate: tuple[int, ...]) -> FunctionPlan:
        graph = self._graph
        chosen = {node.name: self._chosen(node) for node in graph.nodes.values() if node.call is not None}
        read = {value: self._read(value, chosen) for value in self._places}
        names = {place: value for value, place in self._places.items()}
        by_place = [names.get(place, Value(f"{TENSOR}{place}")) for place in range(len(self._arguments))]
        results, spec = pytree.tree_flatten(graph.outputs)
        updates = {int(name.removeprefix(TENSOR)): value for name, value in graph.updates.items()}
        tensors = dict.fromkeys(each for each in (*results, *updates.values()) if isinstance(each, Value))
        made = tuple(value for value in tensors if value not in self._places)
        device = self._mesh.device_mesh().device_type
        return FunctionPlan(
            program=self._program(chosen, read, made, coordinate),
            arguments={
                value: read.get(value, argument.layout)
                for value, argument in zip(by_place, self._arguments, strict=True)
            },
            made=made,
            layouts={value: self._layouts[value] for value in tensors},
            shapes={value: graph.meta(value).shape for value in tensors},
            results=tuple(results),
            results_spec=spec,
            updates=updates,
            views=self._views(),
            constants={
                Value(node.name): graph.constants[node.source].to(device)
                for node in graph.nodes.values()
                if node.kind == CONSTANT
            },
        )

    def _program(
        self,
        chosen: Mapping[str, Option],
        read: Mapping[Value, Layout],
        made: tuple[Value, ...],
        coordinate: tuple[int, ...],
    ) -> Program:
        """Return the call as a program. Partial sums are complete before their first reader, and in results."""
        nodes = {
            name: node if node.call is not None else replace(node, kind=INPUT)
            for name, node in self._graph.nodes.items()
        }
        graph = replace(self._graph, nodes=nodes, outputs=made, updates={}, constants={})
        layouts = {**self._layouts, **read}
        for name, option in chosen.items():
            layouts |= zip(graph.nodes[name].values, option.outputs, strict=True)
        plan = ShardingPlan(
            graph=graph,
            mesh=self._mesh,
            costs=self._costs,
            objective="communication",
            layouts=layouts,
            inputs={name: chosen[name].inputs if name in chosen else () for name in nodes},
            shared_layouts={value: _reduced(layout) for value, layout in layouts.items() if _reduced(layout) != layout},
            differentiable=self._differentiable,
            configured={},
            single=frozenset(),
            cost=0.0,
            returned={value: self._layouts[value] for value in made},
        )
        rank_plan = RankPlan(plan=plan, fused_plan=FusedPlan.of(plan), coordinate=coordinate, local_inputs=True)
        return compile_plan(rank_plan, graph, gradients=False)

    def _chosen(self, node: Node) -> Option:
        """Return the option of an operator that takes the least time; note the layouts of its outputs."""
        assert node.call is not None
        gradients = [value in self._differentiable for value in node.inputs]
        outputs = {
            value for value, meta in zip(node.values, node.outputs, strict=True) if any(gradients) and is_float(meta)
        }
        self._differentiable |= outputs
        # What is whole on a mesh dimension stays whole there: slices are free, and gathering them later is not.
        cut = [
            any(self._layouts[value][dim].kind not in WHOLE for value in node.inputs) for dim in range(len(self._shape))
        ]
        options = [
            option
            for option in self._options.of(node, (*gradients, bool(outputs)))
            if all(
                placement.kind in WHOLE or cut[dim]
                for layout in (*option.inputs, *option.outputs)
                for dim, placement in enumerate(layout)
            )
        ]
        option = min(options, key=lambda option: self._seconds(node, option))
        for value, layout in zip(node.values, option.outputs, strict=True):
            self._layouts[value] = _reduced(layout)
        return option

    def _seconds(self, node: Node, option: Option) -> tuple[float, float]:
        """Return the time that collectives of the forward take, and the time of forward and backward with computing.

        The first decides: a tensor is computed where it lies, as its marks ask for, though backward may then send more.
        """
        assert node.call is not None
        sends = sum(step.seconds for step in op_collective_steps(node.call, option.inputs, self._costs))
        rest = seconds(node.call, option, self._shape, self._model)
        for value, target in zip(node.inputs, option.inputs, strict=True):
            found = self._between(value, self._layouts[value], target)
            sends += found.forward.seconds
            rest += found.backward.seconds if value in self._differentiable else 0
        for value, layout in zip(node.values, option.outputs, strict=True):
            sends += self._between(value, layout, _reduced(layout)).forward.seconds
        return sends, sends + rest

    def _read(self, value: Value, chosen: dict[str, Option]) -> Layout:
        """Return an argument's layout, R* where all its readers give terms of its gradient."""
        reads = [
            option.inputs[place]
            for name, option in chosen.items()
            for place, read in enumerate(self._graph.nodes[name].inputs)
            if read == value
        ]
        return tuple(
            PARTIAL_GRAD
            if reads and placement == REPLICATE and all(read[dim] == PARTIAL_GRAD for read in reads)
            else placement
            for dim, placement in enumerate(self._layouts[value])
        )

    def _between(self, value: Value, source: Layout, target: Layout) -> DifferentiableRedistribution:
        meta = self._graph.meta(value)
        return plan_differentiable(meta.shape, meta.dtype.itemsize, self._mesh, source, target, self._costs)

    def _views(self) -> dict[Value, int]:
        """Return, for each value that is a view of an argument on one card, the argument's place."""
        roots = dict(self._places)
        roots |= {value: int(name.removeprefix(TENSOR)) for name, value in self._graph.updates.items()}
        for node in self._graph.nodes.values():
            viewed = _viewed(node) if node.call is not None else None
            if viewed is not None and viewed in roots:
                roots |= {value: roots[viewed] for value in node.values if value not in roots}
        return roots


def _viewed(node: Node) -> Value | None:
    """Return the tensor that a call's outputs may be views of, by the operator's schema; None: they are new."""
    assert node.call is not None
    schema = node.call.target._schema  # type: ignore[attr-defined]
    if not any(result.alias_info is not None for result in schema.returns):
        return None
    for place, declared in enumerate(schema.arguments):
        given = node.call.args[place] if place < len(node.call.args) else None
        if declared.alias_info is not None and isinstance(given, Ref):
            return node.inputs[given.index]
    return None


def _reduced(layout: Layout) -> Layout:
    """Return the layout in which a call gives a tensor: sums are complete."""
    return tuple(REPLICATE if placement.kind == "partial" else placement for placement in layout)
