"""Compute the time of a training step on TP x CP x DP x PP ranks: the layers' closed forms, timed by the step model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from ascend_parallel.devices import device_type
from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.tuning.cost_model.cost import CostModel, ranks_in_domain
from ascend_parallel.tuning.cost_model.layer_passes import ChunkSchedule
from ascend_parallel.tuning.cost_model.layers import RECOMPUTE, EmbeddingAndLogitsTime, TransformerLayerTime
from ascend_parallel.tuning.cost_model.models import TORCH, Batch, Model
from ascend_parallel.tuning.cost_model.tables import require
from ascend_parallel.tuning.step_time.rank_bytes import ZERO_STAGES
from ascend_parallel.tuning.step_time.replicas import Numbers, ReplicatedState, Weights
from ascend_parallel.tuning.step_time.runtimes import MEGATRON, WIDE, Runtime
from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.step import StepTimes, StepWork, time_step


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a step: sizes, micro-batches per replica, recomputation, and what runs under the last backward.

    virtual_stages
        Pipeline stages of each rank; more than one: interleaved 1F1B.
    recompute_layers
        The layers of each stage that are recomputed; 0: all.
    zero
        1: replicas share the optimizer's states (weights are gathered after the update). 2: gradients too, which each
        backward reduce-scatters. 3: weights too: each layer's are gathered for forward and for backward, one ahead.
    overlap_gradients
        Sums of gradients start under backward, in buckets; None: as the runtime does.
    runtime
        What runs the step: `MEGATRON`, or `PLANNED`, which plan-training plans for.
    """

    dp: int = 1
    pp: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    virtual_stages: int = 1
    recompute_layers: int = 0
    zero: int = 0
    overlap_gradients: bool | None = None
    runtime: Runtime = MEGATRON

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        for option in ("dp", "pp", "micro_batches", "virtual_stages"):
            require(option, getattr(self, option), getattr(self, option) >= 1, "a whole number of 1 or more")
        alone = self.pp > 1 or self.virtual_stages == 1
        require("--virtual-stages", self.virtual_stages, alone, "1 with --pp 1: one stage has no pipeline")
        require("recompute_layers", self.recompute_layers, self.recompute_layers >= 0, "a whole number of 0 or more")
        require("--recompute", self.recompute, self.recompute in RECOMPUTE, ", ".join(RECOMPUTE))
        require("zero", self.zero, self.zero in ZERO_STAGES, ", ".join(map(str, ZERO_STAGES)))

    @property
    def schedule(self) -> str:
        """The pipeline's schedule; with fewer micro-batches than stages 1F1B runs all forwards first."""
        if self.virtual_stages > 1:
            return "interleaved_1f1b"
        return "1f1b" if self.micro_batches >= self.pp else "gpipe"

    def recomputed(self, dense: int, sparse: int) -> tuple[int, int]:
        """Return the number of a stage's recomputed layers of each kind; the first ones are recomputed."""
        count = self.recompute_layers or dense + sparse
        return min(dense, count), min(sparse, max(count - dense, 0))


def step_time(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: ChunkSchedule) -> StepTimes:
    """Return the time of one step.

    Ranks fill servers in Megatron-core's order: tensor-parallel ranks, then context-parallel ranks, then replicas, then
    stages; the slowest send between two stages counts. Gradients are summed in fp32, and clipped by their norm. The
    rank with the most work sets the pace.
    """
    return time_step(step_work(costs, model, batch, layout, schedule))


def step_work(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: ChunkSchedule) -> StepWork:
    """Return the work of a pipeline's ranks in a step, in seconds; the slowest of all cards sets the pace."""
    ranks = ranks_of(batch, layout)
    costs = of_slowest(costs, ranks)
    stages = layout.pp * layout.virtual_stages
    most = model.layers if layout.virtual_stages == 1 else model.layers + 2  # the ends may stand alone
    require("--pp", stages, stages <= most, f"at most the {model.layers} layers of {model.name}")
    check_experts(model, batch, layout)
    passes = _Passes(costs, model, batch, layout, schedule)
    work = np.array(
        [passes.stage(stage, *layers) for stage, layers in enumerate(layers_of_stages(model, batch, layout))]
    )
    hop = 0.0
    if layout.pp > 1:
        hop = costs.send(sent_bytes(model, batch), inside=ranks <= costs.hardware.collectives.domain)
    state = replicated_state(costs, model, batch, layout)
    return state.step_work(*state.passes(work[:, 0], work[:, 1]), schedule=layout.schedule, send=hop)


def sent_bytes(model: Model, batch: Batch) -> int:
    """Return the bytes of a micro-batch that a rank sends to the next stage."""
    return batch.own_rows * model.hidden * batch.dtype.itemsize


def replicated_state(costs: CostModel | None, model: Model, batch: Batch, layout: Layout) -> ReplicatedState:
    """Return the weights of the pipeline's ranks, and what the replicas share of them.

    costs: None if only bytes are asked for.
    """
    stages, under = layout.pp * layout.virtual_stages, layout.overlap_gradients
    item = batch.dtype.itemsize
    return ReplicatedState(
        weights=held_weights(costs, model, batch, layout),
        ranks_of_stages=stages_of(layout.schedule, layout.pp, stages) if layout.pp > 1 else (0,) * stages,
        layers=[sum(layers) for layers in layers_of_stages(model, batch, layout)],
        micro_batches=layout.micro_batches,
        zero_stage=layout.zero,
        under_backward=layout.runtime.sums_under_backward and layout.pp == 1 if under is None else under,
        masters=item < WIDE,
        runtime=layout.runtime,
        stream=costs.stream if costs else _untimed,
        adds_inside=device_type(batch.device).adds_gradients and layout.runtime.wide_gradients,
    )


def operators_of(runtime: Runtime) -> str:
    """Return a runtime's `activation` and `rotary` of a `Batch`: how it runs the operators around the matmuls."""
    return "fused" if runtime.fused else TORCH


def ranks_of(batch: Batch, layout: Layout) -> int:
    """Return the ranks of the job."""
    return batch.tp * batch.cp * layout.dp * layout.pp


@lru_cache(maxsize=16)
def of_slowest(costs: CostModel, ranks: int) -> CostModel:
    """Return the costs on the slowest of so many ranks; cached, because layers cache their best chunk sizes by it."""
    return CostModel(costs.hardware.of_slowest(ranks))


def check_experts(model: Model, batch: Batch, layout: Layout) -> None:
    """Refuse degrees that do not divide the experts, or the ranks that may share them."""
    ranks = batch.tp * batch.cp * layout.dp
    if not model.experts:
        require("--ep", batch.ep, batch.ep == 1, f"1: {model.name} has no experts")
        require("--etp", batch.etp, batch.etp == 1, f"1: {model.name} has no experts")
        return
    given = f"tp x cp x dp = {ranks} ranks"
    require("--ep", batch.ep, model.experts % batch.ep == 0, f"a divisor of the {model.experts} experts")
    require("--ep", batch.ep, ranks % (batch.ep * batch.etp) == 0, f"a number whose product with --etp divides {given}")
    require("--etp", batch.etp, model.expert_ffn % batch.etp == 0, f"a divisor of the width {model.expert_ffn}")
    alike = batch.tp == 1 or batch.sequence_parallel
    require("--no-sequence-parallel", "true", alike, "it with --tp 1: else ranks would send the same rows to experts")


def held_weights(costs: CostModel | None, model: Model, batch: Batch, layout: Layout) -> tuple[Weights, ...]:
    """Return the weights of each stage with their replicas: all but the experts' first, then the experts'.

    A stage has its layers, and the embedding or the logits' weights. Tensor-, context- and data-parallel ranks share
    the experts (Megatron-core's order: experts' widths, experts, their replicas); the others are whole on each context-
    and data-parallel rank.
    """
    apart, own_expert = batch.ep * batch.etp, model.experts * model.expert_weights() / (batch.ep * batch.etp)
    layers = np.array(layers_of_stages(model, batch, layout), dtype=float)
    plain = layers @ np.array([model.dense_weights(), model.sparse_weights()]) / batch.tp
    ends = model.vocab * model.hidden / batch.tp
    plain[0] += ends + model.positions * model.hidden
    plain[-1] += ends if not model.tied or layout.pp > 1 else 0.0
    if layout.runtime.shares_along_dp:
        return _along_dp(costs, plain, layers[:, 1] * own_expert, batch, layout)
    found = [_weights(costs, plain, batch.cp * layout.dp, batch.tp, batch.dtype.itemsize)]
    if model.experts:
        copies = batch.tp * batch.cp * layout.dp // apart
        found.append(_weights(costs, layers[:, 1] * own_expert, copies, apart, batch.dtype.itemsize))
    return tuple(found)


def _along_dp(
    costs: CostModel | None, plain: Numbers, experts: Numbers, batch: Batch, layout: Layout
) -> tuple[Weights, ...]:
    """Return the weights of a plan's mesh dp x ep x cp x tp: ZeRO's replicas are those of "dp" alone."""
    item, inner = batch.dtype.itemsize, batch.tp * batch.cp * batch.ep
    lines = [(batch.cp, batch.tp), (batch.ep, batch.tp * batch.cp)]
    further = [_collective(costs, count, stride) for count, stride in lines if count > 1]
    dense = _weights(costs, plain, layout.dp // batch.ep, inner, item)
    dense = replace(dense, further_sums=[partial(each, ALL_REDUCE) for each in further])
    return dense, *([_weights(costs, experts, layout.dp // batch.ep, inner, item)] if experts.any() else [])


def _weights(costs: CostModel | None, elements: Numbers, count: int, stride: int, itemsize: int) -> Weights:
    """Return weights that `count` ranks hold, `stride` ranks apart."""
    return Weights(
        elements=elements,
        own=elements / count,
        itemsize=itemsize,
        replicas=count,
        collective=_collective(costs, count, stride),
    )


def _collective(costs: CostModel | None, count: int, stride: int) -> Callable[[str, float], float]:
    """Return the seconds of collectives over `count` ranks, `stride` ranks apart."""
    line = np.arange(stride * count).reshape(count, stride).T

    def seconds(kind: str, nbytes: float) -> float:
        if costs is None:
            return _untimed(nbytes)
        inside = ranks_in_domain(line, costs.hardware.collectives.domain)
        return costs.line(kind, nbytes, count, inside)

    return seconds


def _untimed(nbytes: float) -> float:
    raise AssertionError(f"the seconds of {nbytes} bytes are asked for without a cost model")


class _Passes:
    """Seconds of a stage's forward and backward."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: ChunkSchedule) -> None:
        self._costs, self._model, self._batch, self._layout = costs, model, batch, layout
        self._last = layout.pp * layout.virtual_stages - 1
        (dense, sparse), self._ends = layers_of(costs, model, batch), ends_of(costs, model, batch)
        self._times = [
            (layer.forward(schedule), layer.backward(schedule), layer.recomputed(schedule, layout.recompute))
            for layer in (dense, sparse)
        ]
        self._logits = self._ends.seconds(schedule)

    def stage(self, stage: int, dense: int, sparse: int) -> tuple[float, float]:
        """Return the seconds of forward and backward of a micro-batch."""
        forward = backward = 0.0
        kinds = zip((dense, sparse), self._layout.recomputed(dense, sparse), self._times, strict=True)
        for layers, recomputed, times in kinds:
            forward += layers * times[0]
            backward += layers * times[1] + recomputed * times[2]
        for ends, logits in ((stage == 0, False), (stage == self._last, True)):
            if ends:
                forward += self._logits[0] if logits else self._ends.embedding
                backward += self._logits[1] if logits else self._ends.embedding
        return forward, backward


@lru_cache(maxsize=16)
def layers_of(costs: CostModel, model: Model, batch: Batch) -> tuple[TransformerLayerTime, TransformerLayerTime]:
    """Return a layer with an MLP and one with experts, or two with an MLP; cached, with their best chunk sizes."""
    dense = TransformerLayerTime(costs, model, batch)
    return dense, TransformerLayerTime(costs, model, batch, sparse=True) if model.experts else dense


@lru_cache(maxsize=16)
def ends_of(costs: CostModel, model: Model, batch: Batch) -> EmbeddingAndLogitsTime:
    """Return the ends; cached, because they cache their best chunk sizes."""
    return EmbeddingAndLogitsTime(costs, model, batch)


def parts_of(costs: CostModel, model: Model, batch: Batch) -> tuple[TransformerLayerTime, EmbeddingAndLogitsTime]:
    """Return the last kind of layer and the ends."""
    return layers_of(costs, model, batch)[1], ends_of(costs, model, batch)


def layers_of_stages(model: Model, batch: Batch, layout: Layout) -> list[tuple[int, int]]:
    """Return the number of dense layers and of layers with experts of each stage; the dense ones are the first."""
    stages, dense, result = layout.pp * layout.virtual_stages, model.layers - model.sparse_layers, []
    counts = spread(model.layers, stages)
    if layout.runtime.balances_stages and 1 < stages <= model.layers:
        counts = _balanced(model, batch, stages)
    for layers in counts:
        own = min(dense, layers)
        dense -= own
        result.append((own, layers - own))
    return result


@lru_cache(maxsize=64)
def _balanced(model: Model, batch: Batch, stages: int) -> list[int]:
    """Return the layers of stages with as little work as possible in the largest, by multiply-adds with the logits."""
    logits = model.vocab * model.hidden
    layer = (model.macs_per_token(batch.sequence) - logits) / model.layers
    last = max(1, round((model.layers + logits / layer) / stages - logits / layer))
    last = min(last, model.layers - stages + 1)
    return [*spread(model.layers - last, stages - 1), last]


def spread(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: as equal as possible, fewer on the last stages, near the logits.

    With one or two stages more than layers the first and the last hold the embedding and the logits alone.
    """
    if stages > layers:
        return [0] * (stages - layers - 1) + [1] * layers + [0]
    cuts = [-(-layers * i // stages) for i in range(stages + 1)]
    return [stop - start for start, stop in pairwise(cuts)]
