"""One forward of a rank's part of a planned model: node by node, with explicit collectives between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.overlap.forward_wrapper import ForwardWrapper, run_directly
from ascend_parallel.sharding.graph import CALL, CONSTANT, INPUT, Graph, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, forward
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.rules import own_reductions, run_local
from ascend_parallel.sharding.runtime.async_redistribute import start
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent, counting, counting_inside
from ascend_parallel.sharding.runtime.gradient_reduction import GradientReducer
from ascend_parallel.sharding.runtime.op_collectives import all_reducer
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.overlapped_linear import Kernel
from ascend_parallel.sharding.runtime.prefetch import Prefetch, PrefetchGroup
from ascend_parallel.sharding.runtime.randomness import Randomness
from ascend_parallel.sharding.runtime.recompute_autograd import Results, Tensors, recompute_in_backward, sync_boundary
from ascend_parallel.sharding.runtime.recompute_regions import Region
from ascend_parallel.sharding.runtime.redistribute_autograd import (
    DifferentiableRedistribution,
    convert,
    plan_differentiable,
)
from ascend_parallel.sharding.runtime.regather import regather_in_backward

_Known = dict[tuple[Value, Layout], torch.Tensor]


class RankModule(Protocol):
    """The attributes of a `ShardedModule` that a forward reads."""

    plan: ShardingPlan
    schedule: Schedule
    coordinate: tuple[int, ...]
    local_inputs: bool
    randomness: Randomness
    collective_counts: Counter[CollectiveEvent]
    gradients: GradientReducer
    last_reads: dict[str, list[Value]]
    regions: dict[str, Region]
    prefetch_by_node: dict[str, list[PrefetchGroup]]

    @property
    def graph(self) -> Graph:
        """The graph that runs."""

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return the module at a path."""

    def update_buffers(self, values: Mapping[Value, torch.Tensor]) -> None:
        """Store the values that the forward computed for buffers."""


class Forward:
    """One forward, and the tensors that its remaining nodes read."""

    def __init__(
        self,
        module: RankModule,
        inputs: Mapping[str, torch.Tensor],
        region: Region | None = None,
        results: Results | None = None,
        graph: Graph | None = None,
        stream: str = "",
    ) -> None:
        """Take the rank's part of the model, and the tensors of its input nodes.

        region, results, graph, stream
            Only for the run of a recompute region: the region, the results that its first run keeps for its second, and
            the graph and the random stream of the forward that it belongs to.
        """
        self._module, self._plan, self._schedule = module, module.plan, module.schedule
        self._inputs, self._region, self._results = inputs, region, results
        self._graph, self._stream = graph or module.graph, stream or module.randomness.begin()
        self._counting = partial(counting, module.collective_counts, module.plan.mesh)
        self._values: dict[Value, torch.Tensor] = {}
        self._shared: dict[Value, torch.Tensor] = {}
        self._read_before: set[Value] = set()
        self._in_flight: dict[tuple[Value, str, Layout], Callable[[], torch.Tensor]] = {}

    def outputs(self) -> Any:
        """Run all nodes and return the model's outputs."""
        self._run_all(self._graph.nodes.values(), self._module.regions if torch.is_grad_enabled() else {})
        self._module.update_buffers(self._values)
        return pytree.tree_map(self._returned, self._graph.outputs)

    def run_region(self, tensors: Tensors) -> Tensors:
        """Run the region's nodes on the tensors that the region reads, and return its outputs."""
        region, graph = self._region, self._graph
        assert region is not None
        count = len(region.reads)
        self._values |= dict(zip(region.reads, tensors[:count], strict=True))
        self._read_before |= set(region.reads)
        self._shared |= dict(zip(region.read_shared, tensors[count:], strict=True))
        self._run_all((graph.nodes[name] for name in region.nodes), {})
        outputs = [self._values[value] for value in region.gives]
        return (*outputs, *(self._shared[value] for value in region.given_shared))

    def _run_all(self, nodes: Iterable[Node], regions: Mapping[str, Region]) -> None:
        """Run nodes in this order, and free tensors after their last reader."""
        done: set[str] = set()
        for node in nodes:
            for group in self._module.prefetch_by_node.get(node.name, ()):
                self._start(group)
            if node.kind != CALL:
                self._values[Value(node.name)] = self._tensor(node)
            elif node.name in regions:
                self._run_recomputed(regions[node.name])
                done |= set(regions[node.name].nodes)
            elif node.name not in done:
                done |= self._call(node)
            for value in self._module.last_reads.get(node.name, ()):
                self._values.pop(value, None)
                self._shared.pop(value, None)

    def _run_recomputed(self, region: Region) -> None:
        """Run a region that backward recomputes."""
        module, graph, stream = self._module, self._graph, self._stream

        def body(results: Results, tensors: Tensors) -> Tensors:
            return Forward(module, {}, region, results, graph, stream).run_region(tensors)

        inputs = (*map(self._value, region.reads), *(self._shared_value(value)[0] for value in region.read_shared))
        outputs = recompute_in_backward(body, inputs, keep_collectives=not region.recompute_collectives)
        count = len(region.gives)
        self._values |= dict(zip(region.gives, outputs[:count], strict=True))
        self._shared |= dict(zip(region.given_shared, outputs[count:], strict=True))

    def _tensor(self, node: Node) -> torch.Tensor:
        """Return the rank's part of an input, parameter, buffer or constant."""
        if node.kind == INPUT:
            tensor, value = self._inputs[node.name], Value(node.name)
            if self._module.local_inputs:
                return tensor
            replicated = (REPLICATE,) * self._plan.mesh.ndim
            return self._convert(tensor, value, node.name, "", replicated, self._schedule.layouts[value])
        path, _, name = ("", "", node.name) if node.kind == CONSTANT else node.source.rpartition(".")
        held: torch.Tensor = getattr(self._module.get_submodule(path), name)
        return held

    def _call(self, node: Node) -> set[str]:
        """Run a node, together with the other nodes of its kernel; return their names."""
        kernel = self._schedule.kernels.get(node.name)
        if kernel is None:
            self._store(node, self._run(node))
            return {node.name}
        nodes = [self._plan.graph.nodes[name] for name in kernel.nodes]
        known: _Known = {}  # the nodes of a kernel convert a tensor that they all read once
        inputs = [self._read(member, known) for member in nodes]
        with self._regather_in_backward(nodes, inputs):
            outputs = kernel.run(inputs, self._forward_wrapper(kernel))
        for member, output in zip(nodes, outputs, strict=True):
            self._store(member, (output,))
        return set(kernel.nodes)

    def _forward_wrapper(self, kernel: Kernel) -> ForwardWrapper:
        """Return the forward wrapper of a kernel in a recompute region."""
        if self._results is None or self._region is None:
            return run_directly
        names = set(kernel.nodes)
        return partial(
            self._results.kernel,
            keep=bool(names & self._region.kept),
            communicates=kernel.communicates,
            read=bool(names & self._region.read_inside),
        )

    def _run(self, node: Node) -> tuple[torch.Tensor, ...]:
        assert node.call is not None
        outputs = [self._schedule.layouts[Value(node.name, index)] for index in range(len(node.outputs))]
        layouts, inputs = self._schedule.inputs[node.name], self._read(node, {})
        mesh, count = self._plan.mesh, counting_inside(self._module.collective_counts, self._plan.mesh, node)
        all_reduce = all_reducer(mesh, self._plan.costs, count)
        kept = self._region is not None and node.name in self._region.kept
        if self._results is not None:
            all_reduce = self._results.reducing(all_reduce, keep=kept)
        coordinate, stream = self._module.coordinate, f"{self._stream}/{node.name}"
        run = partial(run_local, node.call, inputs, layouts, outputs, mesh.shape, coordinate, all_reduce, stream)
        if self._results is not None and kept and not own_reductions(node.call, layouts, mesh.shape):
            return self._results.operator(run)
        with self._regather_in_backward([node], [inputs]):
            return run()

    def _regather_in_backward(
        self, nodes: Sequence[Node], inputs: Sequence[Sequence[torch.Tensor]]
    ) -> AbstractContextManager[None]:
        """Return a context in which autograd saves no gathered parameter: backward gathers them a second time."""
        regathered = self._plan.regathered
        if not regathered or self._region is not None or not torch.is_grad_enabled():
            return nullcontext()  # the second run of a region gathers its parameters itself
        found = [
            (tensor, self._gather(value, node, target))
            for node, tensors in zip(nodes, inputs, strict=True)
            for value, target, tensor in zip(node.inputs, self._schedule.inputs[node.name], tensors, strict=True)
            if value in regathered and forward(target) != forward(self._schedule.layouts[value])
        ]
        return regather_in_backward(found)

    def _gather(self, value: Value, node: Node, target: Layout) -> Callable[[], torch.Tensor]:
        """Return the function that gathers a parameter in backward, in the layout in which `node` reads it."""
        plan, local = self._plan, self._value(value).detach()
        source, version = forward(self._schedule.layouts[value]), local._version
        count_event = self._counting(node.module, value, node.name)

        def count(_: str, step: RedistributeStep) -> None:
            count_event("backward", step)

        def gather() -> torch.Tensor:
            if local._version != version:
                raise RuntimeError(f"{plan.graph.nodes[value.node].source} was changed between forward and backward")
            with torch.no_grad():
                shape = plan.graph.meta(value).shape
                return convert(local, shape, plan.mesh, source, forward(target), plan.costs, count)

        return gather

    def _store(self, node: Node, outputs: tuple[torch.Tensor, ...]) -> None:
        assert len(outputs) == len(node.outputs), f"{node.name} gave {len(outputs)} of {len(node.outputs)} outputs"
        self._values |= {Value(node.name, index): output for index, output in enumerate(outputs)}

    def _read(self, node: Node, known: _Known) -> list[torch.Tensor]:
        """Return a node's inputs in the layouts in which the node reads them; `known` caches converted tensors."""
        found = []
        for value, target in zip(node.inputs, self._schedule.inputs[node.name], strict=True):
            if (value, target) not in known:
                local, source = self._shared_value(value)
                known[value, target] = self._convert(local, value, node.name, node.module, source, target)
            found.append(known[value, target])
        region = self._region
        is_boundary = region is not None and region.sync_boundary and node.name == region.last
        return sync_boundary(found) if is_boundary else found

    def _shared_value(self, value: Value) -> tuple[torch.Tensor, Layout]:
        """Return a tensor in its shared layout, or without a shared layout in the layout that it has."""
        source = self._schedule.layouts[value]
        if value not in self._schedule.shared_layouts:
            return self._value(value), source
        shared = self._schedule.shared_layouts[value]
        if value not in self._shared:
            module = self._plan.graph.nodes[value.node].module
            self._shared[value] = self._convert(self._value(value), value, "shared", module, source, shared)
        return self._shared[value], shared

    def _value(self, value: Value) -> torch.Tensor:
        """Return a tensor; the first read of a parameter hands its gradient to the `GradientReducer`."""
        if value not in self._read_before:
            self._values[value] = self._module.gradients.read(value, self._values[value])
            self._read_before.add(value)
        return self._values[value]

    def _start(self, group: PrefetchGroup) -> None:
        """Start redistributions before the nodes that read the tensors."""
        locals_ = [self._value(prefetch.value) for prefetch in group.conversions]
        plans = [self._prefetch_plan(*pair) for pair in zip(group.conversions, locals_, strict=True)]
        for prefetch, end in zip(group.conversions, start(locals_, plans), strict=True):
            self._in_flight[prefetch.value, prefetch.reader, prefetch.target] = end

    def _prefetch_plan(self, prefetch: Prefetch, local: torch.Tensor) -> DifferentiableRedistribution:
        mesh, value = self._plan.mesh, prefetch.value
        count = self._counting(prefetch.module, value, prefetch.reader)
        shape, itemsize = self._plan.graph.meta(value).shape, local.element_size()
        return plan_differentiable(shape, itemsize, mesh, prefetch.source, prefetch.target, self._plan.costs, count)

    def _returned(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        source, target = self._schedule.layouts[leaf], self._plan.returned_layout(leaf)
        return self._convert(self._value(leaf), leaf, "", "", source, target)

    def _convert(
        self, local: torch.Tensor, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> torch.Tensor:
        end = self._in_flight.pop((value, reader, target), None)
        if end is not None:
            return end()
        count_event, sent = self._counting(module, value, reader), list[RedistributeStep]()

        def count(direction: str, step: RedistributeStep) -> None:
            if direction == "forward":
                sent.append(step)
            count_event(direction, step)

        shape = self._plan.graph.meta(value).shape
        run = partial(convert, local, shape, self._plan.mesh, source, target, self._plan.costs, count)
        if self._results is None or source == target:
            return run()
        return self._results.conversion(run, lambda: bool(sent) and value not in self._plan.regathered)
