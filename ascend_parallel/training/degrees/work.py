"""The work of one replica's tensor-parallel ranks on a micro-batch, operator by operator, from an exact plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from ascend_parallel.ops.call import EXPERT_EXCHANGE, Exchange
from ascend_parallel.ops.registry import choose
from ascend_parallel.process_groups.collectives import ALL_TO_ALL
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import CALL, PARAMETER, Node, OpCall, SharedSequence, Value
from ascend_parallel.sharding.layout import Layout, Shape, local_shape
from ascend_parallel.sharding.planner.gradient_sums import summed_dims
from ascend_parallel.sharding.planner.operator_cost import FREE, passes
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.rules import exchanges, experts
from ascend_parallel.sharding.runtime.activation_memory import SavedTensors
from ascend_parallel.sharding.runtime.checkpointed_blocks import CheckpointedBlock
from ascend_parallel.sharding.runtime.kernel_cost import exposed_collectives, exposed_exchanges
from ascend_parallel.sharding.runtime.rank_plan import RankPlan, plan_for_rank
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.training.degrees.folding import FoldedGraph, LayerSpan
from ascend_parallel.training.pipeline.stage_assignment import crossing_bytes, work_done
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.experts import COPY_ACCESSES, ExchangeWork, in_groups

TENSOR = "tp"
# What backward recomputes: nothing; the layers, with the results of collectives kept; the layers and their collectives.
NONE, LAYERS, COLLECTIVES = "none", "layers", "layers+collectives"
RECOMPUTE = (NONE, LAYERS, COLLECTIVES)
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RecomputeCost:
    """Per operator, with a kind of recompute: bytes kept for backward, and what the second run takes.

    saved
        Bytes that a micro-batch keeps from forward to backward.
    again, again_sent
        Seconds of the second run of computation and of collectives.
    inside
        Bytes that a block's second run brings back, at the block's first operator.
    """

    saved: Numbers
    again: Numbers
    again_sent: Numbers
    inside: Numbers


@dataclass(frozen=True)
class Parameter:
    """A parameter as one rank of a replica holds it, and the operators that read it, by index.

    summed_over
        The mesh dimensions of the replica over which its gradient is summed, once in a step.
    """

    shape: Shape
    itemsize: int
    readers: tuple[int, ...]
    summed_over: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the rank's part."""
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class OperatorCosts:
    """Per operator: seconds of forward and backward, of their collectives, and bytes; arrays over the operators.

    Collectives of a plan that was planned to run overlapped take what stays exposed beside a matmul.

    sequence
        The operators of the whole model in running order, as indices.
    spans
        The layers of the whole model.
    touched
        Bytes that an operator's backward needs beside what was kept: gradients of its inputs and outputs.
    sent
        Bytes of a rank that cross the cut after the operator.
    gathers_weights
        Whether forward gathers more bytes of parameters than of activations: "tp" then runs as ZeRO-3 does.
    whole_weights
        Whether most bytes of parameters are whole on each of several "tp" ranks: they cut the batch or the sequence.
    unsharded, crossing
        Seconds of the unsharded operator, and unsharded bytes that cross, as `balanced` cuts stages.
    """

    plan: ShardingPlan
    sequence: npt.NDArray[np.int64]
    forward: Numbers
    backward: Numbers
    forward_sent: Numbers
    backward_sent: Numbers
    touched: Numbers
    sent: Numbers
    unsharded: Numbers
    crossing: Numbers
    parameters: tuple[Parameter, ...]
    gathers_weights: bool
    whole_weights: bool
    kept: Mapping[str, RecomputeCost]
    spans: tuple[LayerSpan, ...]

    @property
    def sharing(self) -> SharedSequence | None:
        """How ranks share sequences in the attention that takes longest; None: in none."""
        calls = (node.call for node in self.plan.graph.nodes.values() if node.call is not None and node.call.sequence)
        longest = max(calls, key=lambda call: prod(call.inputs[0].shape), default=None)
        return None if longest is None else longest.sequence


def recompute_of(kind: str, layers: Sequence[str]) -> Recompute:
    """Return the option of a strategy for a kind of recompute of the modules `layers`."""
    if kind == NONE:
        return Recompute()
    return Recompute(modules=layers, collectives="recompute" if kind == COLLECTIVES else "keep")


def work_of(
    folded: FoldedGraph,
    plan: ShardingPlan,
    settings: Settings,
    ranks: int = 1,
    recomputes: Mapping[str, Recompute] | None = None,
) -> OperatorCosts:
    """Price the operators of a plan of the folded graph, on a mesh of one replica's ranks, or of all replicas'.

    ranks: of the whole job, whose slowest sets the pace. recomputes: kinds of recompute; None: RECOMPUTE, of layers.
    """
    hardware = plan.costs.hardware
    assert hardware is not None
    calls = [plan.graph.nodes[node.name] for node in folded.graph.of_kind(CALL)]
    model = CostModel(hardware.of_slowest(ranks))
    forward, backward = np.array([_passes(plan, node, model) for node in calls]).reshape(-1, 2).T
    if recomputes is None:
        recomputes = {kind: recompute_of(kind, folded.layers) for kind in (RECOMPUTE if folded.layers else (NONE,))}
    pricing = _Pricing(plan, calls, (forward, backward), model, settings)
    first = (0,) * len(tuple(plan.mesh.shape))
    ranked = {kind: plan_for_rank(plan, first, settings, recompute=each) for kind, each in recomputes.items()}
    kept = {kind: pricing.kept(each, recomputes[kind].collectives == "recompute") for kind, each in ranked.items()}
    return OperatorCosts(
        plan=plan,
        sequence=folded.sequence,
        forward=forward,
        backward=backward,
        forward_sent=pricing.forward,
        backward_sent=pricing.backward,
        touched=pricing.touched(),
        sent=np.array(crossing_bytes(folded.graph, calls, pricing.local_bytes)),
        unsharded=np.diff(np.array(work_done(calls, hardware)), prepend=0.0),
        crossing=np.array(crossing_bytes(folded.graph, calls), dtype=float),
        parameters=pricing.parameters(),
        gathers_weights=pricing.gathers_weights,
        whole_weights=pricing.whole_weights,
        kept=kept,
        spans=folded.spans,
    )


class _Pricing:
    """Attributes the costs of a plan to its operators, by index."""

    def __init__(
        self,
        plan: ShardingPlan,
        calls: Sequence[Node],
        computed: tuple[Numbers, Numbers],
        model: CostModel,
        settings: Settings,
    ) -> None:
        self._plan, self._calls, self._once = plan, calls, computed[0]
        self._place = {node.name: index for index, node in enumerate(calls)}
        self._shape = tuple(plan.mesh.shape)
        self.forward, self.backward = (np.zeros(len(calls)) for _ in range(2))
        self._summed: dict[Value, tuple[int, ...]] = {}
        moved = {True: 0.0, False: 0.0}
        collectives = exposed_collectives(plan)
        for name, (ahead, back) in collectives.kernels.items():
            self.forward[self._place[name]] += ahead
            self.backward[self._place[name]] += back
        for conversion in collectives.rest.conversions:
            at = self._place[conversion.reader.split(", ")[0]] if conversion.reader else len(calls) - 1
            back = conversion.back.seconds if conversion.back else 0.0
            held = plan.graph.nodes[conversion.value.node].kind == PARAMETER
            moved[held] += conversion.ahead.nbytes
            self.forward[at] += conversion.ahead.seconds
            # A replicated parameter's gradient is summed once, after the last micro-batch.
            if held and not conversion.ahead.nbytes:
                dims = summed_dims(conversion.source, conversion.target)
                self._summed[conversion.value] = tuple(sorted({*self._summed.get(conversion.value, ()), *dims}))
            else:
                self.backward[at] += back
        self.gathers_weights = moved[True] > moved[False]
        exchanges = exposed_exchanges(plan, model)
        for name, (ahead, back) in exchanges.items():
            self.forward[self._place[name]] += ahead
            self.backward[self._place[name]] += back
        for name, steps in plan.op_collectives.items():
            call, place = plan.graph.nodes[name].call, self._place[name]
            if name in exchanges:
                continue
            if call is not None and call.name == experts.CALL:
                own = computed[0][place], computed[1][place]
                ahead, back = exchange_seconds(call, plan.inputs[name], plan.costs, own, model, settings)
                self.forward[place] += ahead
                self.backward[place] += back
            else:
                self.forward[place] += sum(step.seconds for step in steps)

    @property
    def whole_weights(self) -> bool:
        """Whether most bytes of parameters are whole along the mesh's last dimension, of several ranks."""
        sizes = {True: 0.0, False: 0.0}
        for node in self._plan.graph.nodes.values():
            if node.kind == PARAMETER:
                value = Value(node.name)
                sizes[self._plan.layouts[value][-1].kind == "replicate"] += self.local_bytes(value)
        return self._shape[-1] > 1 and sizes[True] > sizes[False]

    def local_bytes(self, value: Value) -> float:
        """Return the bytes of a rank's part of a tensor."""
        return self._plan.graph.meta(value).local_bytes(self._plan.layouts[value], self._shape)

    def touched(self) -> Numbers:
        """Return, per operator, the bytes of a rank's parts of its inputs and outputs that have gradients."""
        found = np.zeros(len(self._calls))
        for index, node in enumerate(self._calls):
            for value in (*node.inputs, *node.values):
                if node.call is not None and node.call.operator in FREE:
                    continue
                if value in self._plan.differentiable and self._plan.graph.nodes[value.node].kind == CALL:
                    found[index] += self.local_bytes(value)
            if node.call is not None and node.call.name == experts.CALL:  # and the gradients of what its experts keep
                found[index] += experts.saved_bytes(node.call, self._plan.inputs[node.name], self._shape)
        return found

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters with their readers."""
        readers, found = self._plan.graph.readers(), []
        for node in self._plan.graph.nodes.values():
            if node.kind == PARAMETER:
                (meta,), value = node.outputs, Value(node.name)
                shape = local_shape(meta.shape, self._plan.layouts[value], self._shape, (0,) * len(self._shape))
                places = tuple(self._place[name] for name, _ in readers[value])
                found.append(Parameter(shape, meta.dtype.itemsize, places, self._summed.get(value, ())))
        return tuple(found)

    def kept(self, rank_plan: RankPlan, collectives: bool) -> RecomputeCost:
        """Return the bytes that backward keeps with the blocks of a rank's plan, and the time of their second run."""
        saved_tensors = SavedTensors(rank_plan)
        saved, again, again_sent, inside = (np.zeros(len(self._calls)) for _ in range(4))
        starts = dict(rank_plan.checkpointed_blocks)
        within = {name for block in starts.values() for name in block.nodes}
        seen: set[object] = set()
        for index, node in enumerate(self._calls):
            block = starts.get(node.name)
            if block is not None:
                sent = [name for name in block.nodes if collectives or self._exchanges(name)]
                again_sent[index] = sum(self.forward[self._place[name]] for name in sent)
                brought = saved_tensors.by_all(self._plan.graph.nodes[name] for name in block.nodes)
                kept = saved_tensors.by_block(block)
                inside[index] = sum(size for key, size in brought.items() if key not in kept)
                for name in self._run_again(block, rank_plan):
                    again[self._place[name]] = self._once[self._place[name]]
            elif node.name in within:
                continue
            else:
                kept = saved_tensors.by_operator(node)
            saved[index] = sum(size for key, size in kept.items() if key not in seen)
            seen |= kept.keys()
        return RecomputeCost(saved, again, again_sent, inside)

    def _exchanges(self, name: str) -> bool:
        """Tell whether an operator exchanges tokens or heads: again in every second run."""
        call = self._plan.graph.nodes[name].call
        return call is not None and exchanges(call, self._plan.inputs[name], self._shape)

    def _run_again(self, block: CheckpointedBlock, rank_plan: RankPlan) -> Iterable[str]:
        """Yield the operators that backward runs again (`CheckpointedBlock`, and docs/recompute.md)."""
        kernels = rank_plan.fused_plan.kernels
        for name in block.nodes:
            kernel = kernels.get(name)
            communicates = kernel is not None and kernel.communicates and not block.recompute_collectives
            if name not in block.kept and name != block.last and not communicates:
                yield name


def exchange_seconds(
    call: OpCall,
    layouts: Sequence[Layout],
    costs: MeshCosts,
    computed: tuple[float, float],
    model: CostModel,
    settings: Settings,
) -> tuple[float, float]:
    """Return the seconds that a mixture's exchange adds to its experts, forward and backward.

    computed: the experts' forward and backward, half of which are weight gradients. Groups of experts hide a part of
    the all-to-alls: as many as the settings ask for.
    """
    (dim,) = experts.exchange_dims(layouts)
    ahead, _, back, _ = experts.collectives(call, layouts, costs.shape)
    weights, width = len(call.inputs) - experts.UP, call.inputs[experts.X].shape[-1]
    count, *_ = local_shape(call.inputs[experts.UP].shape, layouts[experts.UP], costs.shape, (0,) * len(costs.shape))
    dtype, ranks = call.inputs[experts.X].dtype, costs.shape[dim]
    exchange = Exchange(EXPERT_EXCHANGE, count, None, width, dtype, model.hardware.device, ranks)
    sizes = choose(exchange, settings).sizes
    found = []
    forward, half = computed[0], computed[1] / 2
    for sent, compute, tail, again in ((ahead, forward, 0.0, 0.0), (back, half, half, half / weights)):
        work = ExchangeWork(
            experts=count,
            send=partial(_all_to_all, costs, dim, sent.nbytes),
            compute=compute,
            tail=tail,
            again=again,
            copy=model.stream(COPY_ACCESSES * sent.nbytes / ranks),
        )
        found.append(in_groups(model, work, sizes).seconds - compute - tail)
    return found[0], found[1]


def _all_to_all(costs: MeshCosts, dim: int, nbytes: float, share: float) -> float:
    return costs.seconds(ALL_TO_ALL, share * nbytes, dim)


def _passes(plan: ShardingPlan, node: Node, model: CostModel) -> tuple[float, float]:
    assert node.call is not None
    option = Option(plan.inputs[node.name], plan.output_layouts(node))
    return passes(node.call, option, tuple(plan.mesh.shape), model)
