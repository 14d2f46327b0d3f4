"""The time of a training step: a pipeline, sums of gradients that backward hides, gathers of weights, the optimizer.

This is the one model of a step. `predict` asks it with the times of a transformer's layers, plan-training with those of
a planned graph; both get the same number for the same times. Chunked calls inside a layer have their closed forms
(cost_model/chunk_pipeline.py), which give the seconds that stand here.

Lanes: each rank computes on a lane of its own, as the pipeline's schedule orders. Sums of gradients and gathers of
weights run on the link or the network beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.timing import rank_ends


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What the ranks of a pipeline do in a step, in seconds; a step without a pipeline has one rank and one stage.

    forward, backward
        By stage, of a micro-batch, with the collectives inside a replica.
    send
        A micro-batch's tensors from a rank to the next.
    sums, buckets
        By rank: the sums of all gradients over the replicas, and the number of equal buckets that they run in.
    under_backward
        Whether a bucket starts as soon as the last backward has its gradients; otherwise all start after it.
    gathers
        By rank: gathers of weights after the optimizer.
    optimizer
        By rank.
    """

    schedule: str = "1f1b"
    micro_batches: int = 1
    forward: Sequence[float]
    backward: Sequence[float]
    send: float = 0.0
    sums: Sequence[float] = (0.0,)
    buckets: Sequence[int] = (1,)
    under_backward: bool = False
    gathers: Sequence[float] = (0.0,)
    optimizer: Sequence[float] = (0.0,)

    @property
    def ranks(self) -> int:
        """The ranks of the pipeline."""
        return len(self.sums)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step; `pipeline`, `gradients`, `gathers` and `optimizer` follow each other.

    pipeline
        Until the last rank has finished its backwards.
    gradients
        From then until the last sum of gradients has ended: what is exposed.
    hidden
        The rest of the sums of the rank whose sums take the longest.
    """

    pipeline: float
    gradients: float
    hidden: float
    gathers: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step's seconds."""
        return self.pipeline + self.gradients + self.gathers + self.optimizer


def time_step(work: StepWork) -> StepTimes:
    """Return the seconds of a step.

    A rank sums the gradients of its stages when its last backward has them: with a pipeline, early stages' ranks finish
    last, and the others sum while they wait. The optimizer waits for all ranks (the norm of all gradients).
    """
    return time_after(work, pipeline_ends(work))


def time_after(work: StepWork, ends: Sequence[float]) -> StepTimes:
    """Return the seconds of a step whose ranks' last backwards end at `ends`."""
    last = [backward_of_rank(work, rank) if work.under_backward else 0.0 for rank in range(work.ranks)]
    summed = [
        end + exposed(sums, buckets, backward)
        for end, sums, buckets, backward in zip(ends, work.sums, work.buckets, last, strict=True)
    ]
    pipeline, longest = max(ends), max(work.sums)
    gradients = max(0.0, max(summed) - pipeline)
    after = [gather + update for gather, update in zip(work.gathers, work.optimizer, strict=True)]
    slowest = max(range(work.ranks), key=after.__getitem__)
    return StepTimes(
        pipeline=pipeline,
        gradients=gradients,
        hidden=max(0.0, longest - gradients),
        gathers=work.gathers[slowest],
        optimizer=work.optimizer[slowest],
    )


def exposed(sums: float, buckets: int, backward: float) -> float:
    """Return the seconds by which sums in equal buckets outlast the backward that produces them.

    Bucket i of n is ready at i / n of the backward, and the buckets run one after the other. So the last ends at the
    latest of (i / n) backward + ((n - i + 1) / n) sums: the first or the last bucket decides.
    """
    first = backward / buckets + sums - backward
    return max(first, sums / buckets)


def pipeline_ends(work: StepWork) -> list[float]:
    """Return when each rank's last backward ends."""
    if work.ranks == 1:
        return [work.micro_batches * (sum(work.forward) + sum(work.backward))]
    return rank_ends(work.schedule, work.ranks, work.micro_batches, work.forward, work.backward, work.send)


def backward_of_rank(work: StepWork, rank: int) -> float:
    """Return the seconds of the rank's last backward: of its stages together."""
    if work.ranks == 1:
        return sum(work.backward)
    ranks = stages_of(work.schedule, work.ranks, len(work.backward))
    return sum(seconds for seconds, runs in zip(work.backward, ranks, strict=True) if runs == rank)


def gathered_pass(layers: int, compute: float, gather: float, scatter: float = 0.0) -> float:
    """Return the seconds of equal layers whose weights are gathered one layer ahead (ZeRO-3).

    A layer's computation waits for its gather; the next layer's gather starts with it. A scatter of the layer's
    gradients follows its computation on the same link.
    """
    link = ready = gather
    computed = 0.0
    for layer in range(layers):
        start = max(computed, ready)
        if layer + 1 < layers:
            link = ready = max(link, start) + gather
        computed = start + compute
        if scatter:
            link = max(link, computed) + scatter
    return max(computed, link)
