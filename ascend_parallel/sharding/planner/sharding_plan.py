"""ShardingPlan: a layout for every tensor of a graph, the conversions that follow, and their costs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER, Graph, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, backward
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import op_collective_steps
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan, fuse
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep, Redistribution, plan_redistribution
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes, optimizer_bytes
from ascend_parallel.tuning.step_time.runtimes import WIDE

# Bytes of optimizer state per parameter: Adam's moments in fp32.
ADAM = optimizer_bytes(WIDE, None)


@dataclass(frozen=True)
class Conversion:
    """A conversion of a tensor to another layout, and of its gradient back.

    reader
        The node that reads the tensor in the target layout; "" for an output of the model; several names with commas.
    ahead, back
        The collectives of forward, and of backward where the tensor has a gradient.
    """

    value: Value
    reader: str
    source: Layout
    target: Layout
    ahead: Redistribution
    back: Redistribution | None

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward."""
        return self.ahead.seconds + (self.back.seconds if self.back else 0.0)

    @property
    def nbytes(self) -> float:
        """Bytes that a rank sends in forward and backward."""
        return self.ahead.nbytes + (self.back.nbytes if self.back else 0)

    @property
    def communicates(self) -> bool:
        """Whether the conversion sends any bytes."""
        return self.nbytes > 0


@dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPlan:
    """The result of `propagate`.

    layouts
        The layout in which each tensor is produced.
    inputs
        The layouts in which each node reads its inputs.
    shared_layouts
        For tensors with several readers: the layout to which the tensor is converted once, before each reader's own
        conversion.
    configured
        The pattern of the strategy that fixed a node, by node.
    single
        Nodes with a single option.
    cost, bound
        The plan's objective in seconds, and a lower bound for all plans; None: the cost is proven to be least.
    returned
        The layout in which the caller gets an output; other outputs are whole on every rank.
    regathered
        Parameters that backward gathers again instead of keeping them, outside of checkpointed blocks. No conversion
        contains these collectives.
    overlap
        The settings by whose chunks the cost of a collective next to a matmul is what stays exposed; None: every
        collective is in the cost with its full time. `conversions` and `seconds` always are the full times.
    hidden_sums
        Seconds of the sums of gradients that their buckets save and the backward hides: not in the cost.
    """

    graph: Graph
    mesh: ProcessMesh
    costs: MeshCosts
    objective: str
    layouts: Mapping[Value, Layout]
    inputs: Mapping[str, tuple[Layout, ...]]
    shared_layouts: Mapping[Value, Layout]
    differentiable: Set[Value]
    configured: Mapping[str, str]
    single: Set[str]
    cost: float
    bound: float | None = None
    returned: Mapping[Value, Layout] = field(default_factory=dict)
    regathered: Set[Value] = frozenset()
    overlap: Settings | None = None
    hidden_sums: float = 0.0

    def __repr__(self) -> str:
        """Return a summary in a line; `explain` returns the details."""
        calls = len(self.graph.of_kind(CALL))
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.collectives().items())) or "no collectives"
        return f"<ShardingPlan of {calls} operators on {self.mesh}: {kinds}, {1e3 * self.seconds:.3f} ms a step>"

    def returned_layout(self, value: Value) -> Layout:
        """Return the layout in which the caller gets an output of the model."""
        return self.returned.get(value, (REPLICATE,) * self.mesh.ndim)

    def output_layouts(self, node: Node) -> tuple[Layout, ...]:
        """Return the layouts in which a node produces its tensors."""
        return tuple(self.layouts[value] for value in node.values)

    def fused(self, settings: Settings, *, held_weights: bool = False) -> FusedPlan:
        """Run the overlap pass, once for settings that fuse alike, and return the fused plan.

        settings: of the overlapped operators; of them counts the arithmetic alone. held_weights: as for `fuse`.
        """
        every_product = settings.arithmetic.forms_every_product
        key = every_product, held_weights
        if key not in self._fused:
            self._fused[key] = fuse(self, every_product=every_product, held_weights=held_weights)
        return self._fused[key]

    @cached_property
    def _fused(self) -> dict[tuple[bool, bool], FusedPlan]:
        return {}

    def beside(self, fused: FusedPlan) -> ShardingPlan:
        """Return the plan with the redistributions alone that no kernel runs."""
        return replace(self, layouts=fused.layouts, inputs=fused.inputs, shared_layouts=fused.shared_layouts)

    @cached_property
    def conversions(self) -> tuple[Conversion, ...]:
        """Return every change of layout, in the order of the graph."""
        return tuple(self._conversions())

    @cached_property
    def op_collectives(self) -> dict[str, tuple[RedistributeStep, ...]]:
        """Return the collectives that operators run themselves in a step, by node."""
        calls = {name: node.call for name, node in self.graph.nodes.items() if node.call is not None}
        steps = {name: op_collective_steps(call, self.inputs[name], self.costs) for name, call in calls.items()}
        return {name: of_node for name, of_node in steps.items() if of_node}

    @property
    def digest(self) -> str:
        """Return a hash that ranks share if they have the same plan for the same shapes."""
        digest = hashlib.sha256(repr((self.mesh.shape, self.mesh.process_ids)).encode())
        for name, node in self.graph.nodes.items():
            outputs = list(self.output_layouts(node))
            digest.update(repr((name, node.outputs, outputs, self.inputs[name])).encode())
        digest.update(
            repr((sorted(self.shared_layouts.items(), key=repr), sorted(self.returned.items(), key=repr))).encode()
        )
        digest.update(repr(sorted(self.regathered, key=repr)).encode())
        calls = ((name, node.call) for name, node in self.graph.nodes.items() if node.call is not None)
        shared = [(name, call.sequence.exchange, call.sequence.groups) for name, call in calls if call.sequence]
        digest.update(repr(shared).encode() if shared else b"")
        return digest.hexdigest()[:16]

    @property
    def seconds(self) -> float:
        """Predicted time of all collectives of a step, forward and backward."""
        own = sum(step.seconds for steps in self.op_collectives.values() for step in steps)
        return sum(conversion.seconds for conversion in self.conversions) + own

    @property
    def nbytes(self) -> float:
        """Bytes that a rank sends in a step."""
        own = sum(step.nbytes for steps in self.op_collectives.values() for step in steps)
        return sum(conversion.nbytes for conversion in self.conversions) + own

    def texts_inside(self, name: str) -> tuple[str, ...]:
        """Return, as text, the collectives that an operator runs itself; of a shared sequence why it runs these."""
        texts = Counter(step.text(self.mesh.dim_names[step.mesh_dim]) for step in self.op_collectives.get(name, ()))
        call = self.graph.nodes[name].call
        reason = (call.sequence.reason,) if call is not None and call.sequence is not None else ()
        return (*reason, *(f"{count} x {text}" if reason and count > 1 else text for text, count in texts.items()))

    def collectives(self) -> dict[str, int]:
        """Return the number of collectives of each kind in a step."""
        redistributions = [
            direction
            for conversion in self.conversions
            for direction in (conversion.ahead, conversion.back)
            if direction
        ]
        sequences = [*(redistribution.steps for redistribution in redistributions), *self.op_collectives.values()]
        return dict(Counter(step.kind for steps in sequences for step in steps if step.nbytes))

    def memory(self) -> RankBytes:
        """Return the bytes that a rank holds in a training step with Adam; activations are the outputs for backward."""
        parameters = gradients = buffers = activations = count = 0.0
        for node in self.graph.nodes.values():
            for value, meta in zip(node.values, node.outputs, strict=True):
                held = meta.local_bytes(self.layouts[value], self.mesh.shape)
                if node.kind == PARAMETER:
                    parameters, gradients = parameters + held, gradients + held
                    count += held / meta.dtype.itemsize
                elif node.kind == BUFFER:
                    buffers += held
                elif node.kind == CALL and value in self.differentiable:
                    activations += held
        return RankBytes(parameters + buffers, gradients, ADAM * count, activations)

    def why(self, node: Node) -> str:
        """Return a short reason for the node's layouts."""
        if node.name in self.configured:
            return f"configured: {self.configured[node.name]}"
        return "only choice" if node.name in self.single else "propagated"

    def _conversions(self) -> Iterator[Conversion]:
        for value, readers in self.graph.readers().items():
            layout = self.layouts[value]
            if value in self.shared_layouts:
                names = ", ".join(dict.fromkeys(name for name, _ in readers))
                yield from self._conversion(value, names, layout, self.shared_layouts[value])
                layout = self.shared_layouts[value]
            for name, index in readers:
                yield from self._conversion(value, name, layout, self.inputs[name][index])
        for output in self.graph.returned:
            yield from self._conversion(output, "", self.layouts[output], self.returned_layout(output))

    def _conversion(self, value: Value, reader: str, source: Layout, target: Layout) -> Iterator[Conversion]:
        if source == target:
            return
        back = None
        if value in self.differentiable:
            back = self.redistribution(value, backward(target), backward(source))
        yield Conversion(value, reader, source, target, self.redistribution(value, source, target), back)

    def redistribution(self, value: Value, source: Layout, target: Layout) -> Redistribution:
        """Return the collectives that bring a tensor from one layout to another."""
        meta = self.graph.meta(value)
        return plan_redistribution(meta.shape, meta.dtype.itemsize, self.mesh.shape, source, target, self.costs)
