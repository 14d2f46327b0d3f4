"""Compiles a plan for a rank: the decisions that are the same in every step become a flat list of instructions.

Compiling runs no collective and makes no process group, so a plan for thousands of ranks compiles anywhere.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

import torch

from ascend_parallel.sharding.graph import BUFFER, CALL, INPUT, Graph, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, forward, local_shape, with_placement
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import own_step
from ascend_parallel.sharding.planner.shared_sequences import Readers, projection_of
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.edges import Observer
from ascend_parallel.sharding.redistribute.redistribute_local import redistribute_local
from ascend_parallel.sharding.redistribute.shortest_path import Redistribution
from ascend_parallel.sharding.rules import Reduction, exchanges, local_call, own_collectives
from ascend_parallel.sharding.rules.local import AllReduce, ExchangeRanks
from ascend_parallel.sharding.runtime.checkpointed_blocks import CheckpointedBlock
from ascend_parallel.sharding.runtime.collective_event import Counting
from ascend_parallel.sharding.runtime.compute_instructions import Gather, RecomputeBlock, Run, RunKernel, SyncBoundary
from ascend_parallel.sharding.runtime.instructions import (
    Instruction,
    Load,
    Program,
    Redistribute,
    Register,
    Start,
    Store,
    Wait,
    with_frees,
)
from ascend_parallel.sharding.runtime.prefetch import PrefetchGroup
from ascend_parallel.sharding.runtime.rank_plan import RankPlan
from ascend_parallel.sharding.runtime.segments import with_segments

Conversions = dict[tuple[Value, Layout], int]


def compile_plan(rank_plan: RankPlan, graph: Graph, *, gradients: bool, segments: bool = False) -> Program:
    """Return the instructions of a forward. Its inputs are the input nodes; its outputs the leaves of `graph.outputs`.

    graph
        The plan's graph, or its graph of evaluation mode with the same nodes.
    gradients
        Whether autograd records the forward. If not, nothing is recomputed or gathered again.
    segments
        Run the operators between two collectives as one function of torch.compile, outside of checkpointed blocks.
    """
    return _Compiler(rank_plan, graph, gradients, segments=segments).forward()


def all_reducer(mesh: ProcessMesh, costs: MeshCosts, observer: Observer) -> AllReduce:
    """Return the all-reduce that a rule's `run` calls: ``all_reduce(tensor, mesh_dim, op, direction)``."""
    whole = (REPLICATE,) * mesh.ndim

    def all_reduce(tensor: torch.Tensor, mesh_dim: int, op: str, direction: str = "forward") -> torch.Tensor:
        step = own_step(Reduction(mesh_dim, tensor.numel() * tensor.element_size(), op), costs)
        observer(direction, step)
        source = with_placement(whole, mesh_dim, step.source)
        return redistribute_local(tensor, tensor.shape, mesh, Redistribution(source, whole, (step,)))

    return all_reduce


class _Compiler:
    """Compiles a forward, or the body of a checkpointed block."""

    def __init__(
        self,
        rank_plan: RankPlan,
        graph: Graph,
        gradients: bool,
        block: CheckpointedBlock | None = None,
        segments: bool = False,
    ) -> None:
        self._rank_plan, self._graph, self._gradients, self._block = rank_plan, graph, gradients, block
        self._plan, self._fused_plan = rank_plan.plan, rank_plan.fused_plan
        self._segments = segments
        self._instructions: list[Instruction] = []
        self._registers: list[Register] = []
        self._own: dict[Value, int] = {}  # the registers of tensors in the layout in which they are produced
        self._shared: dict[Value, int] = {}  # and in their shared layout
        self._started: dict[tuple[Value, str, Layout], int] = {}

    def forward(self) -> Program:
        rank_plan, nodes = self._rank_plan, self._graph.nodes.values()
        layouts = self._fused_plan.layouts
        whole = (REPLICATE,) * self._plan.mesh.ndim
        inputs = {node.name: Value(node.name) for node in nodes if node.kind == INPUT}
        given = {
            name: self._register(value, layouts[value] if rank_plan.local_inputs else whole)
            for name, value in inputs.items()
        }
        self._own |= {value: given[name] for name, value in inputs.items()}
        recomputed = {name for block in rank_plan.checkpointed_blocks.values() for name in block.nodes}
        done: set[str] = set()
        for node in nodes:
            for group in rank_plan.prefetches.get(node.name, ()):
                self._start(group)
            if node.kind == INPUT and not rank_plan.local_inputs:
                value = inputs[node.name]
                self._own[value] = self._redistribute(given[node.name], value, node.name, "", whole, layouts[value])
            elif self._gradients and node.name in rank_plan.checkpointed_blocks:
                self._recompute(rank_plan.checkpointed_blocks[node.name])
            elif node.kind == CALL and node.name not in done and not (self._gradients and node.name in recomputed):
                done |= self._unit(node)
        return self._program(list(given.values()), self._outputs())

    def body(self) -> Program:
        """Compile the body of the block: its inputs are what the block reads, its outputs what it gives."""
        block = self._block
        assert block is not None
        self._own |= {value: self._register(value, self._fused_plan.layouts[value]) for value in block.reads}
        self._shared |= {
            value: self._register(value, self._fused_plan.shared_layouts[value]) for value in block.read_shared
        }
        inputs = [*self._own.values(), *self._shared.values()]
        done: set[str] = set()
        for name in block.nodes:
            if name not in done:
                done |= self._unit(self._graph.nodes[name])
        outputs = [self._own[value] for value in block.gives]
        return self._program(inputs, [*outputs, *(self._shared[value] for value in block.given_shared)])

    def _program(self, inputs: list[int], outputs: list[int]) -> Program:
        listed = self._instructions
        if self._segments:
            listed = with_segments(listed, outputs)
        instructions = with_frees(listed, outputs)
        return Program(instructions, tuple(self._registers), tuple(inputs), tuple(outputs))

    def _outputs(self) -> list[int]:
        """Store the buffers that the forward updated, and return the registers of the model's outputs."""
        plan, layouts = self._plan, self._fused_plan.layouts
        held = {node.source: layouts[Value(node.name)] for node in plan.graph.of_kind(BUFFER)}
        for value in (*self._graph.updates.values(), *self._graph.returned):
            self._value(value)  # a buffer is loaded before the first store: readers get its old value
        for buffer, value in self._graph.updates.items():
            target = held.get(buffer, (REPLICATE,) * plan.mesh.ndim)
            redistribution = self._rank_plan.redistribution(value, "", "", layouts[value], target)
            self._instructions.append(Store((self._value(value),), (), buffer, redistribution))
        return [
            self._redistribute(self._value(value), value, "", "", layouts[value], plan.returned_layout(value))
            for value in self._graph.returned
        ]

    def _register(self, value: Value, layout: Layout) -> int:
        meta, mesh = self._plan.graph.meta(value), self._plan.mesh
        shape = local_shape(meta.shape, forward(layout), mesh.shape, self._rank_plan.coordinate)
        nbytes = prod(shape) * meta.dtype.itemsize
        held = self._graph.nodes[value.node].kind not in (CALL, INPUT)
        self._registers.append(Register(value, layout, nbytes, held and layout == self._fused_plan.layouts[value]))
        return len(self._registers) - 1

    def _value(self, value: Value) -> int:
        """Return the register of a tensor as it is produced; the first reader of a held tensor loads it."""
        if value not in self._own:
            node = self._graph.nodes[value.node]
            assert node.kind not in (CALL, INPUT), f"{node.name} has not run"
            self._own[value] = self._register(value, self._fused_plan.layouts[value])
            self._instructions.append(Load((), (self._own[value],), value, self._rank_plan.summed_by_value.get(value)))
        return self._own[value]

    def _shared_value(self, value: Value) -> tuple[int, Layout]:
        """Return the register of a tensor in its shared layout, or without a shared layout as it is produced."""
        source, shared = self._fused_plan.layouts[value], self._fused_plan.shared_layouts.get(value)
        if shared is None:
            return self._value(value), source
        if value not in self._shared:
            module = self._plan.graph.nodes[value.node].module
            self._shared[value] = self._redistribute(self._value(value), value, "shared", module, source, shared)
        return self._shared[value], shared

    def _redistribute(
        self, register: int, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> int:
        """Return the register of the tensor in layout `target`."""
        started = self._started.pop((value, reader, target), None)
        if started is not None:
            found = self._register(value, target)
            self._instructions.append(Wait((started,), (found,)))
            return found
        redistribution = self._rank_plan.redistribution(value, reader, module, source, target)
        if redistribution is None:
            return register
        found = self._register(value, target)
        keep = redistribution.communicates and value not in self._plan.regathered
        self._instructions.append(Redistribute((register,), (found,), redistribution, keep))
        return found

    def _start(self, group: PrefetchGroup) -> None:
        sources = tuple(self._value(prefetch.value) for prefetch in group.conversions)
        found, targets = [], []
        for prefetch in group.conversions:
            value, target = prefetch.value, prefetch.target
            redistribution = self._rank_plan.redistribution(
                value, prefetch.reader, prefetch.module, prefetch.source, target
            )
            assert redistribution is not None, "prefetched without a collective"
            found.append(redistribution)
            self._started[value, prefetch.reader, target] = self._register(value, target)
            targets.append(self._started[value, prefetch.reader, target])
        self._instructions.append(Start(sources, tuple(targets), tuple(found)))

    def _recompute(self, block: CheckpointedBlock) -> None:
        reads = (*map(self._value, block.reads), *(self._shared_value(value)[0] for value in block.read_shared))
        body = _Compiler(self._rank_plan, self._graph, self._gradients, block).body()
        layouts, shared_layouts = self._fused_plan.layouts, self._fused_plan.shared_layouts
        self._own |= {value: self._register(value, layouts[value]) for value in block.gives}
        self._shared |= {value: self._register(value, shared_layouts[value]) for value in block.given_shared}
        writes = [*(self._own[value] for value in block.gives), *map(self._shared.__getitem__, block.given_shared)]
        keep = not block.recompute_collectives
        self._instructions.append(RecomputeBlock(reads, tuple(writes), block.module, body, keep))

    def _unit(self, node: Node) -> set[str]:
        """Compile a node, together with the other nodes of its kernel; return their names."""
        kernel, block = self._rank_plan.kernels.get(node.name), self._block
        names = (node.name,) if kernel is None else kernel.fused.nodes
        nodes = [self._graph.nodes[name] for name in names]
        known: Conversions = {}  # the nodes of a kernel convert a tensor that they all read once
        inputs = [self._read(member, known) for member in nodes]
        if block is not None and block.sync_boundary and node.name == block.last:
            inputs[0] = self._bounded(inputs[0])
        gathers = [(place, gather) for place, member in enumerate(nodes) for gather in self._gathers(member)]
        reads = tuple(register for of_node in inputs for register in of_node)
        reads += tuple(gather.source for _, gather in gathers)
        keep = block is not None and not block.kept.isdisjoint(names)
        if kernel is None:
            self._instructions.append(self._run(node, reads, keep, tuple(gather for _, gather in gathers)))
        else:
            read = block is None or not block.read_inside.isdisjoint(names)
            outputs = tuple(register for member in nodes for register in self._given(member))
            self._instructions.append(RunKernel(reads, outputs, kernel, tuple(inputs), keep, read, tuple(gathers)))
        return set(names)

    def _run(self, node: Node, reads: tuple[int, ...], keep: bool, gathers: tuple[Gather, ...]) -> Run:
        """Return the instruction that runs the rank's part of an operator."""
        call, plan, layouts = node.call, self._plan, self._fused_plan.inputs[node.name]
        assert call is not None
        mesh_shape, given = plan.mesh.shape, [self._fused_plan.layouts[value] for value in node.values]
        local = local_call(call, layouts, given, mesh_shape, self._rank_plan.coordinate)
        own = own_collectives(call, layouts, mesh_shape)
        if exchanges(call, layouts, mesh_shape):
            projection = self._projection(node) if call.sequence is not None and not gathers else ()
            reads, find = reads + projection, self._exchange_ranks
            return Run(reads, self._given(node), node, local, None, keep, gathers, find, projection)
        all_reduce = None
        if own:
            count = Counting(self._rank_plan.counts, plan.mesh, node.module, Value(node.name), "inside")
            all_reduce = all_reducer(plan.mesh, plan.costs, count)
        return Run(reads, self._given(node), node, local, all_reduce, keep, gathers)

    def _projection(self, node: Node) -> tuple[int, ...]:
        """Return the registers of weight and bias of the linear layer that reads an attention's output, or nothing.

        It multiplies a rank's rows as they come back, where neither they nor its weight have another layout for it,
        and it is no kernel of its own. The same on all ranks.
        """
        layer = None if self._segments else projection_of(self._graph, self._readers, node)
        if layer is None or layer.name in self._in_kernels or (self._again(layer) != self._again(node)):
            return ()
        plan, value = self._fused_plan, Value(node.name)
        while value.node != layer.name:
            ((reader, place),) = self._readers[value]
            if value in plan.shared_layouts or plan.layouts[value] != plan.inputs[reader][place]:
                return ()
            value = Value(reader)
        held = layer.inputs[1:]
        for value, target in zip(held, plan.inputs[layer.name][1:], strict=True):
            if value in plan.shared_layouts or plan.layouts[value] != target:
                return ()
        return tuple(map(self._value, held))

    def _again(self, node: Node) -> str:
        """Return the first node of the checkpointed block in which backward runs a node again; "": there is none."""
        blocks = self._rank_plan.checkpointed_blocks if self._gradients else {}
        return next((first for first, block in blocks.items() if node.name in block.nodes), "")

    @cached_property
    def _readers(self) -> Readers:
        return self._graph.readers()

    @cached_property
    def _in_kernels(self) -> frozenset[str]:
        """The nodes that run in a kernel."""
        return frozenset(name for kernel in self._fused_plan.kernels.values() for name in kernel.nodes)

    def _exchange_ranks(self, mesh_dim: int) -> ExchangeRanks:
        mesh, rank_plan = self._plan.mesh, self._rank_plan
        places = mesh.places_in_group(mesh_dim, rank_plan.coordinate)
        return ExchangeRanks(mesh.group(mesh_dim), places, rank_plan.settings)

    def _given(self, node: Node) -> tuple[int, ...]:
        """Return new registers for a node's outputs."""
        self._own |= {value: self._register(value, self._fused_plan.layouts[value]) for value in node.values}
        return tuple(self._own[value] for value in node.values)

    def _read(self, node: Node, known: Conversions) -> tuple[int, ...]:
        """Return the registers of a node's inputs, in the layouts in which the node reads them."""
        for value, target in zip(node.inputs, self._fused_plan.inputs[node.name], strict=True):
            if (value, target) not in known:
                register, source = self._shared_value(value)
                known[value, target] = self._redistribute(register, value, node.name, node.module, source, target)
        return tuple(known[pair] for pair in zip(node.inputs, self._fused_plan.inputs[node.name], strict=True))

    def _bounded(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        found = [self._registers[register] for register in inputs]
        marked = tuple(self._register(register.value, register.layout) for register in found)
        self._instructions.append(SyncBoundary(inputs, marked))
        return marked

    def _gathers(self, node: Node) -> list[Gather]:
        """Return the inputs that backward gathers again. The second run of a block gathers its own."""
        plan, layouts = self._plan, self._fused_plan.layouts
        if not self._gradients or self._block is not None:
            return []
        found = []
        for place, (value, target) in enumerate(zip(node.inputs, self._fused_plan.inputs[node.name], strict=True)):
            ends = forward(layouts[value]), forward(target)
            if value in plan.regathered and ends[0] != ends[1]:
                redistribution = self._rank_plan.redistribution(value, node.name, node.module, *ends)
                if redistribution is not None:
                    name = plan.graph.nodes[value.node].source
                    found.append(Gather(place, self._value(value), name, redistribution.in_backward()))
        return found
