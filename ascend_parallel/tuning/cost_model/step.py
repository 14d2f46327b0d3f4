"""Compute the time of a training step on TP x DP x PP ranks in closed form: pipeline, gradients, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ascend_parallel.ops.problem import ALL_REDUCE
from ascend_parallel.tuning.cost_model.cost import CostModel, ranks_in_domain
from ascend_parallel.tuning.cost_model.layer_passes import Schedule
from ascend_parallel.tuning.cost_model.layers import EmbeddingAndLogitsTime, TransformerLayerTime
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.tables import require

# Bytes that Adam moves per parameter: read an fp32 gradient, read and write three fp32 states, write a 16-bit weight.
ADAM_BYTES = 4 + 3 * 4 * 2 + 2
GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a step: data and pipeline parallel sizes, micro-batches per replica, recomputation."""

    dp: int = 1
    pp: int = 1
    micro_batches: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        """Refuse values below 1."""
        for option in ("dp", "pp", "micro_batches"):
            require(option, getattr(self, option), getattr(self, option) >= 1, "a whole number of 1 or more")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step by part, and in total."""

    pipeline: float
    gradients: float
    optimizer: float
    stages: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def total(self) -> float:
        """The sum of the parts, which run one after the other."""
        return self.pipeline + self.gradients + self.optimizer


def step_time(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: Schedule) -> StepTime:
    """Return the time of one step.

    Assumptions: the schedule is 1F1B. Sending activations between stages is not hidden. Replicas sum their gradients
    in fp32 after the last micro-batch, not hidden. Ranks fill servers in Megatron-core's order: tensor-parallel ranks,
    then replicas, then stages; the slowest send between two stages counts. Every replica has all of Adam's states. The
    rank with the most work sets the pace.
    """
    require("--pp", layout.pp, layout.pp <= model.layers, f"at most the {model.layers} layers of {model.name}")
    layer, ends = parts_of(costs, model, batch)
    forward, backward = layer.forward(schedule), layer.backward(schedule, layout.recompute)
    last_forward, last_backward = ends.seconds(schedule)
    stages = []
    for stage, layers in enumerate(spread(model.layers, layout.pp)):
        first, last = stage == 0, stage == layout.pp - 1
        stages.append(
            (
                layers * forward + ends.embedding * first + last_forward * last,
                layers * backward + ends.embedding * first + last_backward * last,
            )
        )
    domain, replica = costs.hardware.collectives.domain, batch.tp * layout.dp
    hop = 0.0
    if layout.pp > 1:
        size = batch.own_rows * model.hidden * batch.dtype.itemsize
        hop = costs.send(size, inside=replica * layout.pp <= domain)
    replicas = np.arange(replica).reshape(layout.dp, batch.tp).T
    parameters = model.count_parameters() / batch.tp / layout.pp
    return StepTime(
        pipeline=pipeline_time(stages, layout.micro_batches, hop),
        gradients=costs.line(ALL_REDUCE, parameters * GRADIENT_BYTES, layout.dp, ranks_in_domain(replicas, domain)),
        optimizer=costs.stream(parameters * ADAM_BYTES),
        stages=tuple(stages),
    )


@lru_cache(maxsize=16)
def parts_of(costs: CostModel, model: Model, batch: Batch) -> tuple[TransformerLayerTime, EmbeddingAndLogitsTime]:
    """Return a layer and the ends; cached, because they cache their best chunk sizes."""
    return TransformerLayerTime(costs, model, batch), EmbeddingAndLogitsTime(costs, model, batch)


def pipeline_time(stages: list[tuple[float, float]], micro_batches: int, hop: float) -> float:
    """Return the time of 1F1B: one micro-batch through all stages, then the others at the slowest stage's pace.

    stages: forward and backward seconds of each stage. hop: seconds of a transfer between two stages. For equal stages
    without hops the result is exact: (micro-batches + stages - 1) (forward + backward). If the last stage is up to 1.5
    times as long, for the logits, an event simulation takes at most 3 % less; otherwise the result is an estimate.
    """
    through = sum(forward + backward for forward, backward in stages) + 2 * hop * (len(stages) - 1)
    pace = max(forward + backward for forward, backward in stages) + (2 * hop if len(stages) > 1 else 0.0)
    return through + (micro_batches - 1) * pace


def spread(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: as equal as possible, fewer on the last stages, near the logits."""
    cuts = [-(-layers * i // stages) for i in range(stages + 1)]
    return [stop - start for start, stop in pairwise(cuts)]
