"""Compute the time of a training step on TP x CP x DP x PP ranks: the layers' closed forms, timed by the step model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

import numpy as np

from ascend_parallel.ops.problem import ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import GATHER, CostModel, ranks_in_domain
from ascend_parallel.tuning.cost_model.gradients import WIDE, accumulated_bytes, adam_bytes, clipped_bytes
from ascend_parallel.tuning.cost_model.layer_passes import Schedule
from ascend_parallel.tuning.cost_model.layers import RECOMPUTE, EmbeddingAndLogitsTime, TransformerLayerTime
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.tables import require
from ascend_parallel.tuning.step_time.rank_bytes import ZERO_STAGES
from ascend_parallel.tuning.step_time.step import StepTimes, StepWork, gathered_pass, time_step

# Parameters of a bucket of gradients: Megatron-core's distributed_data_parallel.py, max(40 M, 1 M for each replica).
BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000
# Devices whose frameworks add a micro-batch's gradient to its fp32 sum inside the matmul (Megatron-core's
# gradient_accumulation_fusion needs a CUDA extension; MindSpeed-LLM's scripts switch it off).
FUSED_ACCUMULATION = ("cuda",)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a step: sizes, micro-batches per replica, recomputation, and what runs under the last backward.

    virtual_stages
        Pipeline stages of each rank; more than one: interleaved 1F1B.
    recompute_layers
        The layers of each stage that are recomputed; 0: all.
    zero
        1: replicas share the optimizer's states (gradients are reduce-scattered, weights gathered after the update).
        2: gradients too. 3: weights too: each layer's are gathered for forward and for backward, one layer ahead.
    overlap_gradients
        Sums of gradients start under the last backward, in buckets.
    """

    dp: int = 1
    pp: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    virtual_stages: int = 1
    recompute_layers: int = 0
    zero: int = 0
    overlap_gradients: bool = False

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        for option in ("dp", "pp", "micro_batches", "virtual_stages"):
            require(option, getattr(self, option), getattr(self, option) >= 1, "a whole number of 1 or more")
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
        """Return how many of a stage's layers of each kind are recomputed; the first ones are."""
        count = self.recompute_layers or dense + sparse
        return min(dense, count), min(sparse, max(count - dense, 0))


def step_time(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> StepTimes:
    """Return the time of one step.

    Ranks fill servers in Megatron-core's order: tensor-parallel ranks, then context-parallel ranks, then replicas, then
    stages; the slowest send between two stages counts. Gradients are summed in fp32, and clipped by their norm. The
    rank with the most work sets the pace.
    """
    return time_step(step_work(costs, model, batch, layout, schedule))


def step_work(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> StepWork:
    """Return what each rank of a pipeline does in a step, in seconds; the slowest of all cards sets the pace."""
    ranks = ranks_of(batch, layout)
    costs = of_slowest(costs, ranks)
    stages = layout.pp * layout.virtual_stages
    most = model.layers if layout.virtual_stages == 1 else model.layers + 2  # the ends may stand alone
    require("--pp", stages, stages <= most, f"at most the {model.layers} layers of {model.name}")
    check_experts(model, batch, layout)
    passes = _Passes(costs, model, batch, layout, schedule)
    work = [passes.stage(stage, *layers) for stage, layers in enumerate(layers_of_stages(model, stages))]
    held, item = held_weights(model, batch, layout), batch.dtype.itemsize

    def over_replicas(kind: str, itemsize: int) -> list[float]:
        return [
            sum(replicas.seconds(costs, kind, weights[rank] * itemsize) for weights, replicas in held)
            for rank in range(layout.pp)
        ]

    sums, gathers = [0.0] * layout.pp, [0.0] * layout.pp
    if layout.zero == 0:
        sums = over_replicas(ALL_REDUCE, WIDE)
    elif layout.zero < len(ZERO_STAGES) - 1:
        sums, gathers = over_replicas(REDUCE_SCATTER, WIDE), over_replicas(GATHER, item)
    updated = clipped_bytes() + adam_bytes(item)
    # The update of a rank's part, and zeros into its gradients for the next step.
    touched = [updated / (replicas.count if layout.zero else 1) + WIDE for _, replicas in held]
    hop = 0.0
    if layout.pp > 1:
        size = batch.own_rows * model.hidden * item
        hop = costs.send(size, inside=ranks <= costs.hardware.collectives.domain)
    return StepWork(
        schedule=layout.schedule,
        micro_batches=layout.micro_batches,
        forward=[forward for forward, _ in work],
        backward=[backward for _, backward in work],
        send=hop,
        sums=sums,
        buckets=[sum(ceil(weights[rank] / replicas.bucket) for weights, replicas in held) for rank in range(layout.pp)],
        under_backward=layout.overlap_gradients,
        gathers=gathers,
        optimizer=[
            costs.stream(sum(weights[rank] * moved for (weights, _), moved in zip(held, touched, strict=True)))
            for rank in range(layout.pp)
        ],
    )


def ranks_of(batch: Batch, layout: Layout) -> int:
    """Return the ranks of the job."""
    return batch.tp * batch.cp * layout.dp * layout.pp


@lru_cache(maxsize=16)
def of_slowest(costs: CostModel, ranks: int) -> CostModel:
    """Return the costs on the slowest of so many ranks; cached, because layers cache their best chunk sizes by it."""
    return CostModel(costs.hardware.of_slowest(ranks))


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same weights: `count` of them, `stride` ranks apart."""

    count: int
    stride: int

    def seconds(self, costs: CostModel, kind: str, size: float) -> float:
        """Return the seconds of a collective over them."""
        line = np.arange(self.stride * self.count).reshape(self.count, self.stride).T
        return costs.line(kind, size, self.count, ranks_in_domain(line, costs.hardware.collectives.domain))

    @property
    def bucket(self) -> int:
        """Parameters of a bucket of gradients."""
        return max(BUCKET, BUCKET_PER_REPLICA * self.count)


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


def held_weights(model: Model, batch: Batch, layout: Layout) -> tuple[tuple[list[float], Replicas], ...]:
    """Return the weights of each rank of a pipeline with their replicas: all but the experts' first, then the experts'.

    A rank has its layers, and the embedding or the logits' weights. Tensor-, context- and data-parallel ranks share the
    experts (Megatron-core's order: experts' widths, experts, their replicas); the others are whole on each context- and
    data-parallel rank.
    """
    apart = batch.ep * batch.etp
    own = model.experts * model.expert_weights() / apart
    plain, of_experts = [0.0] * layout.pp, [0.0] * layout.pp
    for stage, (dense, sparse) in enumerate(layers_of_stages(model, layout.pp * layout.virtual_stages)):
        weights = dense * model.dense_weights() + sparse * model.sparse_weights()
        plain[stage % layout.pp] += weights / batch.tp
        of_experts[stage % layout.pp] += sparse * own
    ends = model.vocab * model.hidden / batch.tp
    plain[0] += ends + model.positions * model.hidden
    plain[-1] += ends if not model.tied or layout.pp > 1 else 0.0
    return (
        (plain, Replicas(batch.cp * layout.dp, batch.tp)),
        (of_experts, Replicas(batch.tp * batch.cp * layout.dp // apart, apart)),
    )


class _Passes:
    """Seconds of a stage's forward and backward."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> None:
        self._costs, self._model, self._batch, self._layout = costs, model, batch, layout
        self._last = layout.pp * layout.virtual_stages - 1
        (dense, sparse), self._ends = layers_of(costs, model, batch), ends_of(costs, model, batch)
        self._times = [
            (layer.forward(schedule), layer.backward(schedule), layer.recomputed(schedule, layout.recompute))
            for layer in (dense, sparse)
        ]
        held, of_expert = held_weights(model, batch, layout), model.experts * model.expert_weights()
        own = of_expert / (batch.ep * batch.etp)
        # By kind of layer: the rank's weights, with the ranks that hold them too.
        self._weights = [
            [(model.dense_weights() / batch.tp, held[0][1])],
            [(model.sparse_weights() / batch.tp, held[0][1]), (own, held[1][1])],
        ]
        self._logits = self._ends.seconds(schedule)
        fused = batch.device in FUSED_ACCUMULATION
        self._accumulated = 0 if fused or layout.zero == 3 else accumulated_bytes(batch.dtype.itemsize)

    def stage(self, stage: int, dense: int, sparse: int) -> tuple[float, float]:
        """Return the seconds of forward and backward of a micro-batch."""
        forward = backward = weights = 0.0
        kinds = zip((dense, sparse), self._layout.recomputed(dense, sparse), self._times, self._weights, strict=True)
        for layers, recomputed, times, held in kinds:
            again = times[2] * recomputed
            weights += layers * sum(size for size, _ in held)
            passes = self._layers(layers, times[0], times[1], again, held) if layers else (0.0, 0.0)
            forward, backward = forward + passes[0], backward + passes[1]
        for ends, logits in ((stage == 0, False), (stage == self._last, True)):
            if ends:
                weights += self._model.vocab * self._model.hidden / self._batch.tp
                forward += self._logits[0] if logits else self._ends.embedding
                backward += self._logits[1] if logits else self._ends.embedding
        return forward, backward + self._costs.stream(weights * self._accumulated)

    def _layers(
        self, layers: int, forward: float, backward: float, again: float, held: Sequence[tuple[float, Replicas]]
    ) -> tuple[float, float]:
        """Return the seconds of equal layers; with ZeRO 3 each layer's weights are gathered one layer ahead."""
        if self._layout.zero < 3 or self._layout.dp == 1:
            return layers * forward, layers * backward + again

        def over_replicas(kind: str) -> float:
            item = self._batch.dtype.itemsize
            return sum(replicas.seconds(self._costs, kind, size * item) for size, replicas in held)

        gather, scatter = over_replicas(GATHER), over_replicas(REDUCE_SCATTER)
        ahead = gathered_pass(layers, forward, gather)
        return ahead, gathered_pass(layers, backward + again / layers, gather, scatter)


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


def layers_of_stages(model: Model, stages: int) -> list[tuple[int, int]]:
    """Return the number of dense layers and of layers with experts of each stage; the dense ones are the first."""
    dense, result = model.layers - model.sparse_layers, []
    for layers in spread(model.layers, stages):
        own = min(dense, layers)
        dense -= own
        result.append((own, layers - own))
    return result


def spread(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: as equal as possible, fewer on the last stages, near the logits.

    With one or two stages more than layers the first and the last hold the embedding and the logits alone.
    """
    if stages > layers:
        return [0] * (stages - layers - 1) + [1] * layers + [0]
    cuts = [-(-layers * i // stages) for i in range(stages + 1)]
    return [stop - start for start, stop in pairwise(cuts)]
