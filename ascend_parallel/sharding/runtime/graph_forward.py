"""One forward of a rank's part of a planned model: node by node, with explicit collectives between them."""

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
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent, op_collective_event
from ascend_parallel.sharding.runtime.gradient_reduction import Gradients
from ascend_parallel.sharding.runtime.op_collectives import all_reducer
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.overlapped_linear import Kernel
from ascend_parallel.sharding.runtime.prefetch import Prefetch, PrefetchGroup
from ascend_parallel.sharding.runtime.randomness import Randomness
from ascend_parallel.sharding.runtime.recompute_autograd import Results, Tensors, fenced, recomputed
from ascend_parallel.sharding.runtime.recompute_regions import Region
from ascend_parallel.sharding.runtime.redistribute_autograd import Ways, convert, ways_between
from ascend_parallel.sharding.runtime.regather import gathered_again

_Known = dict[tuple[Value, Layout], torch.Tensor]


class RankModule(Protocol):
    """What a forward reads of the module that it runs: a `ShardedModule`."""

    plan: ShardingPlan
    schedule: Schedule
    coordinate: tuple[int, ...]
    local_inputs: bool
    randomness: Randomness
    collective_counts: Counter[CollectiveEvent]
    gradients: Gradients
    last_reads: dict[str, list[Value]]
    regions: dict[str, Region]
    starts: dict[str, list[PrefetchGroup]]

    @property
    def graph(self) -> Graph:
        """The graph that runs."""

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return the module at a path."""

    def update_buffers(self, values: Mapping[Value, torch.Tensor]) -> None:
        """Take the values that the forward computed for buffers."""


class Forward:
    """One forward: the tensors that are still to be read."""

    def __init__(
        self,
        module: RankModule,
        given: Mapping[str, torch.Tensor],
        region: Region | None = None,
        results: Results | None = None,
        graph: Graph | None = None,
        stream: str = "",
    ) -> None:
        """Take the rank's part of the model, and the tensors given for its input nodes.

        region, results, graph, stream
            What this is a run of, if not of the whole; what its first run leaves to its second, and was itself of.
        """
        self._module, self._plan, self._schedule = module, module.plan, module.schedule
        self._given, self._region, self._results = given, region, results
        self._graph, self._stream = graph or module.graph, stream or module.randomness.begin()
        self._values: dict[Value, torch.Tensor] = {}
        self._shared: dict[Value, torch.Tensor] = {}
        self._read_before: set[Value] = set()
        self._started: dict[tuple[Value, str, Layout], Callable[[], torch.Tensor]] = {}

    def outputs(self) -> Any:
        """Run all nodes and return what the model returns."""
        self._run_all(self._graph.nodes.values(), self._module.regions if torch.is_grad_enabled() else {})
        self._module.update_buffers(self._values)
        return pytree.tree_map(self._returned, self._graph.outputs)

    def inside(self, tensors: Tensors) -> Tensors:
        """Run the region's nodes for what it reads, and return what it gives."""
        region, graph = self._region, self._graph
        assert region is not None
        count = len(region.reads)
        self._values |= dict(zip(region.reads, tensors[:count], strict=True))
        self._read_before |= set(region.reads)
        self._shared |= dict(zip(region.read_shared, tensors[count:], strict=True))
        self._run_all((graph.nodes[name] for name in region.nodes), {})
        given = [self._values[value] for value in region.gives]
        return (*given, *(self._shared[value] for value in region.given_shared))

    def _run_all(self, nodes: Iterable[Node], regions: Mapping[str, Region]) -> None:
        """Run nodes in this order, and forget what nobody needs any more."""
        done: set[str] = set()
        for node in nodes:
            for ahead in self._module.starts.get(node.name, ()):
                self._start(ahead)
            if node.kind != CALL:
                self._values[Value(node.name)] = self._tensor(node)
            elif node.name in regions:
                self._recomputed(regions[node.name])
                done |= set(regions[node.name].nodes)
            elif node.name not in done:
                done |= self._call(node)
            for value in self._module.last_reads.get(node.name, ()):
                self._values.pop(value, None)
                self._shared.pop(value, None)

    def _recomputed(self, region: Region) -> None:
        """Run a region that runs again in backward."""
        module, graph, stream = self._module, self._graph, self._stream

        def body(results: Results, tensors: Tensors) -> Tensors:
            return Forward(module, {}, region, results, graph, stream).inside(tensors)

        inputs = (*map(self._value, region.reads), *(self._shared_value(value)[0] for value in region.read_shared))
        outputs = recomputed(body, inputs, keep_collectives=not region.again)
        count = len(region.gives)
        self._values |= dict(zip(region.gives, outputs[:count], strict=True))
        self._shared |= dict(zip(region.given_shared, outputs[count:], strict=True))

    def _tensor(self, node: Node) -> torch.Tensor:
        """Return the rank's part of a given tensor."""
        if node.kind == INPUT:
            given, value = self._given[node.name], Value(node.name)
            if self._module.local_inputs:
                return given
            whole = (REPLICATE,) * self._plan.mesh.ndim
            return self._convert(given, value, node.name, "", whole, self._schedule.layouts[value])
        path, _, name = ("", "", node.name) if node.kind == CONSTANT else node.source.rpartition(".")
        tensor: torch.Tensor = getattr(self._module.get_submodule(path), name)
        return tensor

    def _call(self, node: Node) -> set[str]:
        """Run a node, and those that its kernel runs with it; return their names."""
        kernel = self._schedule.kernels.get(node.name)
        if kernel is None:
            self._keep(node, self._run(node))
            return {node.name}
        nodes = [self._plan.graph.nodes[name] for name in kernel.nodes]
        known: _Known = {}  # nodes that run together convert what they all read once
        inputs = [self._read(one, known) for one in nodes]
        with self._gathered_again(nodes, inputs):
            outputs = kernel.run(inputs, self._forward_wrapper(kernel))
        for one, output in zip(nodes, outputs, strict=True):
            self._keep(one, (output,))
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
            read=bool(names & self._region.read_again),
        )

    def _run(self, node: Node) -> tuple[torch.Tensor, ...]:
        assert node.call is not None
        outputs = [self._schedule.layouts[Value(node.name, index)] for index in range(len(node.outputs))]
        wants, inputs = self._schedule.inputs[node.name], self._read(node, {})
        mesh, counts = self._plan.mesh, self._module.collective_counts

        def count(direction: str, step: RedistributeStep) -> None:
            counts[op_collective_event(node, mesh, step)] += 1

        all_reduce = all_reducer(mesh, self._plan.costs, count)
        kept = self._region is not None and node.name in self._region.kept
        if self._results is not None:
            all_reduce = self._results.reducing(all_reduce, keep=kept)
        place, stream = self._module.coordinate, f"{self._stream}/{node.name}"
        run = partial(run_local, node.call, inputs, wants, outputs, mesh.shape, place, all_reduce, stream)
        if self._results is not None and kept and not own_reductions(node.call, wants, mesh.shape):
            return self._results.operator(run)
        with self._gathered_again([node], [inputs]):
            return run()

    def _gathered_again(
        self, nodes: Sequence[Node], inputs: Sequence[Sequence[torch.Tensor]]
    ) -> AbstractContextManager[None]:
        """Return a context in which gathered parameters are not kept; a region gathers them in its second run."""
        regathered = self._plan.regathered
        if not regathered or self._region is not None or not torch.is_grad_enabled():
            return nullcontext()
        found = [
            (tensor, self._gather(value, node, target))
            for node, tensors in zip(nodes, inputs, strict=True)
            for value, target, tensor in zip(node.inputs, self._schedule.inputs[node.name], tensors, strict=True)
            if value in regathered and forward(target) != forward(self._schedule.layouts[value])
        ]
        return gathered_again(found)

    def _gather(self, value: Value, node: Node, target: Layout) -> Callable[[], torch.Tensor]:
        """Return what gathers a parameter in backward, as `node` has read it."""
        plan, counts, local = self._plan, self._module.collective_counts, self._value(value).detach()
        source, version = forward(self._schedule.layouts[value]), local._version

        def count(_: str, step: RedistributeStep) -> None:
            counts[
                CollectiveEvent(
                    step.kind, plan.mesh.dim_names[step.mesh_dim], node.module, value, node.name, "backward"
                )
            ] += 1

        def gather() -> torch.Tensor:
            if local._version != version:
                raise RuntimeError(f"{plan.graph.nodes[value.node].source} was changed between forward and backward")
            with torch.no_grad():
                shape = plan.graph.meta(value).shape
                return convert(local, shape, plan.mesh, source, forward(target), plan.costs, count)

        return gather

    def _keep(self, node: Node, outputs: tuple[torch.Tensor, ...]) -> None:
        assert len(outputs) == len(node.outputs), f"{node.name} gave {len(outputs)} of {len(node.outputs)} outputs"
        self._values |= {Value(node.name, index): output for index, output in enumerate(outputs)}

    def _read(self, node: Node, known: _Known) -> list[torch.Tensor]:
        """Return a node's inputs in the layouts in which it reads them; `known` are some that are there."""
        found = []
        for value, target in zip(node.inputs, self._schedule.inputs[node.name], strict=True):
            if (value, target) not in known:
                local, at = self._shared_value(value)
                known[value, target] = self._convert(local, value, node.name, node.module, at, target)
            found.append(known[value, target])
        fence = self._region is not None and self._region.fenced and node.name == self._region.last
        return fenced(found) if fence else found

    def _shared_value(self, value: Value) -> tuple[torch.Tensor, Layout]:
        """Return a tensor in the layout in which its readers find it."""
        at = self._schedule.layouts[value]
        if value not in self._schedule.shared_layouts:
            return self._value(value), at
        via = self._schedule.shared_layouts[value]
        if value not in self._shared:
            module = self._plan.graph.nodes[value.node].module
            self._shared[value] = self._convert(self._value(value), value, "shared", module, at, via)
        return self._shared[value], via

    def _value(self, value: Value) -> torch.Tensor:
        """Return a tensor; a parameter from its first reader on as one whose gradient is summed after backward."""
        if value not in self._read_before:
            self._values[value] = self._module.gradients.read(value, self._values[value])
            self._read_before.add(value)
        return self._values[value]

    def _start(self, ahead: PrefetchGroup) -> None:
        """Start conversions ahead of the nodes that read the tensors."""
        locals_ = [self._value(one.value) for one in ahead.conversions]
        ways = [self._ways(*pair) for pair in zip(ahead.conversions, locals_, strict=True)]
        for one, end in zip(ahead.conversions, start(locals_, ways), strict=True):
            self._started[one.value, one.reader, one.target] = end

    def _ways(self, one: Prefetch, local: torch.Tensor) -> Ways:
        mesh, counts = self._plan.mesh, self._module.collective_counts

        def count(direction: str, step: RedistributeStep) -> None:
            counts[
                CollectiveEvent(step.kind, mesh.dim_names[step.mesh_dim], one.module, one.value, one.reader, direction)
            ] += 1

        shape = self._plan.graph.meta(one.value).shape
        return ways_between(shape, local.element_size(), mesh, one.source, one.target, self._plan.costs, count)

    def _returned(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        source, target = self._schedule.layouts[leaf], self._plan.returned_layout(leaf)
        return self._convert(self._value(leaf), leaf, "", "", source, target)

    def _convert(
        self, local: torch.Tensor, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> torch.Tensor:
        end = self._started.pop((value, reader, target), None)
        if end is not None:
            return end()
        mesh, counts = self._plan.mesh, self._module.collective_counts
        sent: list[RedistributeStep] = []

        def count(direction: str, step: RedistributeStep) -> None:
            if direction == "forward":
                sent.append(step)
            event = CollectiveEvent(step.kind, mesh.dim_names[step.mesh_dim], module, value, reader, direction)
            counts[event] += 1

        shape = self._plan.graph.meta(value).shape
        run = partial(convert, local, shape, mesh, source, target, self._plan.costs, count)
        if self._results is None or source == target:
            return run()
        return self._results.conversion(run, lambda: bool(sent) and value not in self._plan.regathered)
