"""Compute the time of a training step on TP x CP x DP x PP ranks: the layers' closed forms, timed by the step model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import ceil

import numpy as np

from ascend_parallel.ops.problem import ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import GATHER, CostModel, ranks_in_domain
from ascend_parallel.tuning.cost_model.gradients import WIDE, accumulated_bytes, adam_bytes, clipped_bytes
from ascend_parallel.tuning.cost_model.layer_passes import Schedule
from ascend_parallel.tuning.cost_model.layers import EmbeddingAndLogitsTime, TransformerLayerTime
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.tables import require
from ascend_parallel.tuning.step_time.step import StepTimes, StepWork, gathered_pass, time_step

# Parameters of a bucket of gradients: Megatron-core's distributed_data_parallel.py, max(40 M, 1 M for each replica).
BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000
# Devices whose frameworks add a micro-batch's gradient to its fp32 sum inside the matmul (Megatron-core's
# gradient_accumulation_fusion needs a CUDA extension; MindSpeed-LLM's scripts switch it off).
FUSED_ACCUMULATION = ("cuda",)
ZERO_STAGES = (0, 1, 2, 3)


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
        """Refuse values below 1."""
        for option in ("dp", "pp", "micro_batches", "virtual_stages"):
            require(option, getattr(self, option), getattr(self, option) >= 1, "a whole number of 1 or more")
        require("recompute_layers", self.recompute_layers, self.recompute_layers >= 0, "a whole number of 0 or more")
        require("zero", self.zero, self.zero in ZERO_STAGES, ", ".join(map(str, ZERO_STAGES)))

    @property
    def schedule(self) -> str:
        """The pipeline's schedule."""
        return "interleaved_1f1b" if self.virtual_stages > 1 else "1f1b"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step by part, and in total.

    gradients
        The exposed part of the sums of gradients; `hidden` is the rest.
    optimizer
        The update, with the gathers of weights after it.
    stages
        Seconds of forward and backward of each stage.
    """

    pipeline: float
    gradients: float
    optimizer: float
    hidden: float
    stages: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def total(self) -> float:
        """The sum of the parts, which run one after the other."""
        return self.pipeline + self.gradients + self.optimizer


def step_time(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> StepTime:
    """Return the time of one step.

    Ranks fill servers in Megatron-core's order: tensor-parallel ranks, then context-parallel ranks, then replicas, then
    stages; the slowest send between two stages counts. Gradients are summed in fp32, and clipped by their norm. The
    rank with the most work sets the pace.
    """
    work = step_work(costs, model, batch, layout, schedule)
    times: StepTimes = time_step(work)
    return StepTime(
        pipeline=times.pipeline,
        gradients=times.gradients,
        optimizer=times.gathers + times.optimizer,
        hidden=times.hidden,
        stages=tuple(zip(work.forward, work.backward, strict=True)),
    )


def step_work(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> StepWork:
    """Return what each rank of a pipeline does in a step, in seconds."""
    stages = layout.pp * layout.virtual_stages
    most = model.layers if layout.virtual_stages == 1 else model.layers + 2  # the ends may stand alone
    require("--pp", stages, stages <= most, f"at most the {model.layers} layers of {model.name}")
    passes = _Passes(costs, model, batch, layout, schedule)
    work = [passes.stage(stage, layers) for stage, layers in enumerate(spread(model.layers, stages))]
    weights = stage_parameters(model, batch, layout)
    replicas = batch.cp * layout.dp
    line = np.arange(batch.tp * replicas).reshape(replicas, batch.tp).T
    inside = ranks_in_domain(line, costs.hardware.collectives.domain)
    item = batch.dtype.itemsize

    def over_replicas(kind: str, size: float) -> float:
        return costs.line(kind, size, replicas, inside)

    sums, gathers = [0.0] * layout.pp, [0.0] * layout.pp
    if layout.zero == 0:
        sums = [over_replicas(ALL_REDUCE, size * WIDE) for size in weights]
    elif layout.zero < len(ZERO_STAGES) - 1:
        sums = [over_replicas(REDUCE_SCATTER, size * WIDE) for size in weights]
        gathers = [over_replicas(GATHER, size * item) for size in weights]
    own = 1 / replicas if layout.zero else 1.0
    updated = clipped_bytes() + adam_bytes(item)
    bucket = max(BUCKET, BUCKET_PER_REPLICA * replicas)
    hop = 0.0
    if layout.pp > 1:
        size = batch.own_rows * model.hidden * item
        hop = costs.send(size, inside=batch.tp * replicas * layout.pp <= costs.hardware.collectives.domain)
    return StepWork(
        schedule=layout.schedule,
        micro_batches=layout.micro_batches,
        forward=[forward for forward, _ in work],
        backward=[backward for _, backward in work],
        send=hop,
        sums=sums,
        buckets=[ceil(size / bucket) for size in weights],
        under_backward=layout.overlap_gradients,
        gathers=gathers,
        # The update of a rank's part, and zeros into its gradients for the next step.
        optimizer=[costs.stream(size * (own * updated + WIDE)) for size in weights],
    )


def stage_parameters(model: Model, batch: Batch, layout: Layout) -> list[float]:
    """Return the parameters of each rank of a pipeline: its layers, and the embedding or the logits' weights."""
    result = [0.0] * layout.pp
    for stage, layers in enumerate(spread(model.layers, layout.pp * layout.virtual_stages)):
        result[stage % layout.pp] += layers * model.layer_weights() / batch.tp
    ends = model.vocab * model.hidden / batch.tp
    result[0] += ends + model.positions * model.hidden
    result[-1] += ends if not model.tied or layout.pp > 1 else 0.0
    return result


class _Passes:
    """Seconds of a stage's forward and backward."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> None:
        self._costs, self._model, self._batch, self._layout = costs, model, batch, layout
        self._last = layout.pp * layout.virtual_stages - 1
        layer, self._ends = parts_of(costs, model, batch)
        self._forward, self._backward = layer.forward(schedule), layer.backward(schedule)
        self._again = layer.recomputed(schedule, layout.recompute)
        self._logits = self._ends.seconds(schedule)
        fused = batch.device in FUSED_ACCUMULATION
        self._accumulated = 0 if fused or layout.zero == 3 else accumulated_bytes(batch.dtype.itemsize)

    def stage(self, stage: int, layers: int) -> tuple[float, float]:
        """Return the seconds of forward and backward of a micro-batch."""
        again = self._again * min(layers, self._layout.recompute_layers or layers)
        weights = layers * self._model.layer_weights() / self._batch.tp
        forward, backward = layers * self._forward, layers * self._backward + again
        if self._layout.zero == 3 and self._layout.dp > 1:
            gather, scatter = self._weights(GATHER), self._weights(REDUCE_SCATTER)
            forward = gathered_pass(layers, self._forward, gather)
            backward = gathered_pass(layers, self._backward + again / max(layers, 1), gather, scatter)
        for ends, logits in ((stage == 0, False), (stage == self._last, True)):
            if ends:
                weights += self._model.vocab * self._model.hidden / self._batch.tp
                forward += self._logits[0] if logits else self._ends.embedding
                backward += self._logits[1] if logits else self._ends.embedding
        return forward, backward + self._costs.stream(weights * self._accumulated)

    def _weights(self, kind: str) -> float:
        """Return the seconds of a collective on a layer's weights over the replicas."""
        tp, dp, size = self._batch.tp, self._layout.dp * self._batch.cp, self._model.layer_weights()
        line = np.arange(tp * dp).reshape(dp, tp).T
        inside = ranks_in_domain(line, self._costs.hardware.collectives.domain)
        return self._costs.line(kind, size / tp * self._batch.dtype.itemsize, dp, inside)


@lru_cache(maxsize=16)
def parts_of(costs: CostModel, model: Model, batch: Batch) -> tuple[TransformerLayerTime, EmbeddingAndLogitsTime]:
    """Return a layer and the ends; cached, because they cache their best chunk sizes."""
    return TransformerLayerTime(costs, model, batch), EmbeddingAndLogitsTime(costs, model, batch)


def spread(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: as equal as possible, fewer on the last stages, near the logits.

    With one or two stages more than layers the first and the last hold the embedding and the logits alone.
    """
    if stages > layers:
        return [0] * (stages - layers - 1) + [1] * layers + [0]
    cuts = [-(-layers * i // stages) for i in range(stages + 1)]
    return [stop - start for start, stop in pairwise(cuts)]
