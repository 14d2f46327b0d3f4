"""Plans one call of a torch function on DTensors: which operators it runs, and in which layouts.

The function is traced alone, with whole tensors, to a small graph. For each of its operators in turn, the option of its
rule is taken that sends the least in forward from the layouts that its tensors have, and among those the fastest: by
the same rules and costs as a plan for a whole model, but without a view of the calls to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CONSTANT, Graph, Node, Ref, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout
from ascend_parallel.sharding.marked.function_plan import Argument, FunctionPlan, OperatorRun
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import op_collective_steps, seconds
from ascend_parallel.sharding.planner.options import WHOLE, Option, Options
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.edges import (
    DifferentiableRedistribution,
    plan_differentiable,
)
from ascend_parallel.sharding.rules import local_call, own_reductions
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent, Counting
from ascend_parallel.sharding.runtime.compiler import all_reducer
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

TENSOR = "t"  # tensors of a traced function are its buffers t0, t1, ...


class _Call(torch.nn.Module):
    """A call of a function as a model, so that it can be traced."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        arguments: Sequence[Argument],
        device: str,
    ) -> None:
        super().__init__()
        self._call = function, tuple(leaves), spec
        with FakeTensorMode():
            for index, argument in enumerate(arguments):
                empty = torch.empty(argument.shape, dtype=argument.dtype, device=device)
                self.register_buffer(f"{TENSOR}{index}", empty)

    def forward(self) -> Any:
        function, leaves, spec = self._call
        given = [getattr(self, f"{TENSOR}{leaf.index}") if isinstance(leaf, Ref) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return function(*args, **kwargs)


def plan_function(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    arguments: Sequence[Argument],
    mesh: ProcessMesh,
    coordinate: tuple[int, ...],
    hardware: str,
) -> FunctionPlan:
    """Return the plan of ``function(*args, **kwargs)``, for the rank at `coordinate`.

    leaves, spec
        (args, kwargs) without their nesting; a `Ref` to its place among `arguments` for each tensor.

    Raises `TraceError` for a function that cannot be traced: its result's shape depends on values, or is no tensor.
    """
    device = mesh.device_mesh().device_type
    graph = trace(_Call(function, leaves, spec, arguments, device).eval(), (), twice=False)
    return _Planner(graph, arguments, mesh, coordinate, hardware).plan()


@lru_cache(maxsize=16)
def _costs(mesh: ProcessMesh, hardware: str) -> tuple[MeshCosts, CostModel]:
    return MeshCosts.of(mesh, hardware), CostModel(find_hardware(hardware))


class _Planner:
    """Chooses the layouts of a function's operators, one after the other."""

    def __init__(
        self,
        graph: Graph,
        arguments: Sequence[Argument],
        mesh: ProcessMesh,
        coordinate: tuple[int, ...],
        hardware: str,
    ) -> None:
        self._graph, self._arguments, self._mesh, self._coordinate = graph, arguments, mesh, coordinate
        self._shape = tuple(mesh.shape)
        self._costs, self._model = _costs(mesh, hardware)
        self._options, self._counts = Options(self._shape), Counter[CollectiveEvent]()
        self._places = {
            Value(node.name): int(node.source.removeprefix(TENSOR))
            for node in graph.nodes.values()
            if node.call is None and node.source.startswith(TENSOR)
        }
        whole = (REPLICATE,) * mesh.ndim
        self._layouts = {
            Value(node.name): arguments[self._places[Value(node.name)]].layout
            if Value(node.name) in self._places
            else whole
            for node in graph.nodes.values()
            if node.call is None
        }
        self._differentiable = {value for value, place in self._places.items() if arguments[place].differentiable}

    def plan(self) -> FunctionPlan:
        """Return the plan."""
        chosen = {node.name: self._chosen(node) for node in self._graph.nodes.values() if node.call is not None}
        inputs = {value: self._read(value, chosen) for value in self._places}
        names = {place: value for value, place in self._places.items()}
        results, spec = pytree.tree_flatten(self._graph.outputs)
        by_place = [names.get(place, Value(f"{TENSOR}{place}")) for place in range(len(self._arguments))]
        return FunctionPlan(
            tuple(self._run(self._graph.nodes[name], option, inputs) for name, option in chosen.items()),
            tuple(
                inputs.get(value, argument.layout) for value, argument in zip(by_place, self._arguments, strict=True)
            ),
            tuple(by_place),
            tuple(results),
            spec,
            {value: self._graph.meta(value) for value in self._layouts},
            dict(self._layouts),
            {int(name.removeprefix(TENSOR)): value for name, value in self._graph.updates.items()},
            self._views(),
            {
                Value(node.name): self._graph.constants[node.source].to(self._mesh.device_mesh().device_type)
                for node in self._graph.nodes.values()
                if node.kind == CONSTANT
            },
        )

    def _chosen(self, node: Node) -> Option:
        """Return the option of an operator that takes the least time; note the layouts of its outputs."""
        assert node.call is not None
        gradients = [value in self._differentiable for value in node.inputs]
        outputs = {
            value
            for value, meta in zip(node.values, node.outputs, strict=True)
            if any(gradients) and (meta.dtype.is_floating_point or meta.dtype.is_complex)
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

    def _run(self, node: Node, option: Option, inputs: dict[Value, Layout]) -> OperatorRun:
        assert node.call is not None
        local = local_call(node.call, option.inputs, option.outputs, self._shape, self._coordinate)
        all_reduce = None
        if own_reductions(node.call, option.inputs, self._shape):
            count = Counting(self._counts, self._mesh, "", node.values[0], "inside")
            all_reduce = all_reducer(self._mesh, self._costs, count)
        reads = [
            (value, self._conversion(value, inputs.get(value, self._layouts[value]), target))
            for value, target in zip(node.inputs, option.inputs, strict=True)
        ]
        gives = [
            (value, self._conversion(value, layout, _reduced(layout)))
            for value, layout in zip(node.values, option.outputs, strict=True)
        ]
        return OperatorRun(tuple(reads), local, all_reduce, tuple(gives))

    def _conversion(self, value: Value, source: Layout, target: Layout) -> DifferentiableRedistribution | None:
        if source == target:
            return None
        found = self._between(value, source, target)
        return None if found.is_noop else found

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
