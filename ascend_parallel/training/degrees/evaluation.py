"""The predicted time and memory of a training step at given degrees. docs/degrees.md has the formulas and sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.sharding.layout import Shape
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.space import Degrees
from ascend_parallel.training.degrees.work import NONE, Numbers, OperatorCosts
from ascend_parallel.training.pipeline.stage_assignment import balanced_cuts
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes
from ascend_parallel.tuning.step_time.replicas import ReplicatedState, Weights
from ascend_parallel.tuning.step_time.runtimes import PLANNED
from ascend_parallel.tuning.step_time.schedule import SPLIT, stages_of
from ascend_parallel.tuning.step_time.step import StepWork, time_after, time_step
from ascend_parallel.tuning.step_time.timing import live

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageRecompute:
    """What backward keeps and runs again, ``[layers + 1, stages]``; in row k of the first k layers of each stage.

    A layer that a cut divides is recomputed in all rows.

    saved
        Bytes that a micro-batch keeps.
    again
        Seconds of the second runs, with their collectives.
    inside
        Bytes that a second run brings back.
    """

    saved: Numbers
    again: Numbers
    inside: Numbers

    def rows(self, counts: Counts) -> StageRecompute:
        """Return, by stage, the row of its count of layers; more than a stage has: all of them."""
        at = np.minimum(counts, len(self.saved) - 1), np.arange(self.saved.shape[1])
        return StageRecompute(self.saved[at], self.again[at], self.inside[at])


@dataclass(frozen=True, eq=False)
class StageSums:
    """Seconds and bytes by stage.

    cuts
        The first place of each stage in the model's sequence.
    runs
        ``[stages, operators]``: how often each operator runs in each stage.
    held
        ``[stages, parameters]``: how many parameters like each are in each stage.
    received
        Bytes of a micro-batch's tensors that a stage receives, from both neighbours.
    sent
        The most bytes that a rank sends between two stages, per micro-batch.
    """

    work: OperatorCosts
    cuts: Sequence[int]
    runs: Counts
    held: Counts
    received: Numbers
    sent: float

    def sum(self, numbers: Numbers) -> Numbers:
        """Return, per stage, the sum over its operators."""
        return np.asarray(self.runs @ numbers)

    def most(self, numbers: Numbers) -> Numbers:
        """Return, per stage, the largest number of its operators."""
        return np.asarray(np.where(self.runs > 0, numbers, 0.0).max(axis=1))

    def recompute(self, kind: str) -> StageRecompute:
        """Return the bytes that a kind of recompute keeps and the seconds that it runs again."""
        none, kept = self.work.kept[NONE], self.work.kept[kind]
        saved, again, inside = self.sum(kept.saved), self.sum(kept.again + kept.again_sent), self.most(kept.inside)
        if kind == NONE or not self.work.spans:
            return StageRecompute(saved[None], again[None], inside[None])
        stages, places, divided = self._layers
        left = [
            self._left(numbers, stages, places) for numbers in (none.saved - kept.saved, -kept.again - kept.again_sent)
        ]
        brought = np.tile(inside, (len(left[0]), 1))
        brought[0, ~divided] = 0.0
        return StageRecompute(saved + left[0], np.maximum(again + left[1], 0.0), brought)

    def recomputed(self, counts: Counts) -> tuple[str, ...]:
        """Return the paths of the layers that are recomputed with so many of each stage."""
        stages, places, _ = self._layers
        return tuple(
            span.path
            for span, stage, place in zip(self.work.spans, stages, places, strict=True)
            if stage < 0 or place < counts[stage]
        )

    @cached_property
    def layers(self) -> Counts:
        """The number of whole layers of each stage."""
        stages, *_ = self._layers
        return np.bincount(stages[stages >= 0], minlength=len(self.cuts))

    @cached_property
    def _layers(self) -> tuple[Counts, Counts, npt.NDArray[np.bool_]]:
        """Each layer's stage and its place there, -1 for layers that a cut divides; and whether a stage has such."""
        starts = np.array([span.start for span in self.work.spans], dtype=np.int64)
        lasts = np.array([span.stop - 1 for span in self.work.spans], dtype=np.int64)
        first, last = (np.searchsorted(self.cuts, places, "right") - 1 for places in (starts, lasts))
        whole = first == last
        divided = np.zeros(len(self.cuts), dtype=bool)
        for begin, end in zip(first[~whole], last[~whole], strict=True):
            divided[begin : end + 1] = True
        stages = np.where(whole, first, -1)
        places = np.array([(stages[:index] == stage).sum() for index, stage in enumerate(stages)], dtype=np.int64)
        return stages, np.where(whole, places, -1), divided

    def _left(self, numbers: Numbers, stages: Counts, places: Counts) -> Numbers:
        """Return the sums of numbers of operators over the layers from the k-th on of each stage, in row k."""
        ends = np.concatenate(([0.0], np.cumsum(numbers[self.work.sequence])))
        found = np.zeros((max(0, places.max()) + 2, len(self.cuts)))
        for span, stage, place in zip(self.work.spans, stages, places, strict=True):
            if stage >= 0:
                found[place, stage] = ends[span.stop] - ends[span.start]
        return np.asarray(found[::-1].cumsum(axis=0)[::-1])


def stage_sums(work: OperatorCosts, stages: int) -> StageSums:
    """Cut the model into stages as `balanced` does, and add up each."""
    sequence = work.sequence
    cuts = [0]
    if stages > 1:
        cuts = balanced_cuts(_list(np.cumsum(work.unsharded[sequence])), _list(work.crossing[sequence]), stages)
    runs = np.zeros((stages, len(work.forward)), dtype=np.int64)
    for stage, (start, stop) in enumerate(zip(cuts, [*cuts[1:], len(sequence)], strict=True)):
        np.add.at(runs[stage], sequence[start:stop], 1)
    held = np.array([runs[:, list(parameter.readers)].max(axis=1) for parameter in work.parameters]).T
    crossing = np.array([0.0, *(work.sent[sequence[cut - 1]] for cut in cuts[1:]), 0.0])
    return StageSums(work, cuts, runs, held.reshape(stages, -1), crossing[:-1] + crossing[1:], float(crossing.max()))


def _list(numbers: npt.NDArray[Any]) -> list[float]:
    return [float(number) for number in numbers]


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of a step on the rank with the most work, by part; their sum is the step.

    tensor
        Collectives inside a replica, between tensor-parallel ranks.
    compute
        With the sums of micro-batches' gradients in fp32.
    bubble
        Waits of the pipeline, with its sends.
    replicas
        Sums of gradients as far as no backward hides them, and gathers of parameters (ZeRO).
    """

    compute: float
    tensor: float
    recompute: float
    bubble: float
    replicas: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step's seconds."""
        return float(sum(vars(self).values()))


class Evaluation:
    """Times and memory of degrees on a hardware; caches what degrees share."""

    def __init__(self, hardware: Hardware, planner: Planner, *, masters: bool) -> None:
        """Take the plans; masters: the optimizer has fp32 weights."""
        self.hardware, self.costs = hardware, CostModel(hardware)
        self.planner, self._masters = planner, masters
        self.sums, self.recompute_rows = cache(stage_sums), cache(StageSums.recompute)
        self._stages = cache(lambda shared: _Stages(self, shared))
        self._state = cache(self._state_of)

    def stages(self, degrees: Degrees) -> _Stages:
        """Return the stages that these degrees share with those of other recompute and ZeRO stages."""
        return self._stages(_shared(degrees))

    def bound(self, degrees: Degrees) -> float:
        """Return a lower bound of the step's seconds, without timing the schedule."""
        times = time_after(self.step_work(degrees), self._least_ends(degrees))
        return max(self._least(degrees), times.pipeline + times.gradients) + times.gathers + times.optimizer

    def step_work(self, degrees: Degrees) -> StepWork:
        """Return the work of a pipeline's ranks in a step, for the step model (`tuning/step_time/step.py`)."""
        forward, backward = self.times(degrees)
        state = self.state(degrees)
        return state.step_work(forward, backward, schedule=degrees.schedule, send=self.stages(degrees).hop)

    def state(self, degrees: Degrees) -> ReplicatedState:
        """Return the parameters of the pipeline's ranks, and what the replicas share of them."""
        return self._state(_shared(degrees), degrees.zero_stage)

    def times(self, degrees: Degrees) -> tuple[Numbers, Numbers]:
        """Return the seconds of forward and backward of each stage, with all that a micro-batch adds to them."""
        return self.stages(degrees).times(self.state(degrees), degrees)

    def breakdown(self, degrees: Degrees) -> StepBreakdown:
        """Return the step's seconds by part."""
        at, work = self.stages(degrees), self.step_work(degrees)
        times = time_step(work)
        least = self._least(degrees)  # with many micro-batches the seconds are extrapolated, and may be too few
        seconds, total = max(times.pipeline, least), max(times.total, self.bound(degrees))
        (forward, backward), state = self.times(degrees), self.state(degrees)
        slowest, m = int(at.by_rank(forward + backward).argmax()), degrees.micro_batches
        costs, sums = at.work, at.sums
        tensor = m * at.by_rank(sums.sum(costs.forward_sent + costs.backward_sent))[slowest]
        compute = m * at.by_rank(sums.sum(costs.forward + costs.backward) + state.accumulated)[slowest]
        recompute = m * at.by_rank(at.recompute(degrees).again)[slowest]
        # What ZeRO 2 and 3 send beside each micro-batch, as far as it is not hidden.
        alone = sum(at.stage_passes(degrees)) + state.accumulated
        inside = m * at.by_rank(forward + backward - alone)[slowest]
        return StepBreakdown(
            compute=float(compute),
            tensor=float(tensor),
            recompute=float(recompute),
            bubble=float(seconds - compute - tensor - recompute - inside),
            replicas=float(total - seconds - times.optimizer + inside),
            optimizer=times.optimizer,
        )

    def _least(self, degrees: Degrees) -> float:
        """Return a lower bound of the seconds of forwards and backwards.

        The first forward of rank r comes after those of r stages, and after its last backward come those of r stages.
        """
        at, m = self.stages(degrees), degrees.micro_batches
        forward, backward = self.times(degrees)
        split = degrees.pp > 1 and degrees.schedule in SPLIT
        before = np.concatenate(([0.0], np.cumsum(forward + (0.0 if split else backward))))[: degrees.pp]
        return float((m * at.by_rank(forward + backward) + before).max())

    def _least_ends(self, degrees: Degrees) -> list[float]:
        """Return a lower bound of the end of each rank's last backward: its first forward waits for earlier stages."""
        at, m = self.stages(degrees), degrees.micro_batches
        forward, backward = self.times(degrees)
        before = np.concatenate(([0.0], np.cumsum(forward)))[: degrees.pp]
        return [float(end) for end in m * at.by_rank(forward + backward) + before]

    def memory(self, degrees: Degrees, in_flight: tuple[float, ...] | None = None) -> RankBytes:
        """Return the bytes of the rank that holds the most.

        in_flight: for each rank the micro-batches whose activations it holds; None: those of the schedule.
        """
        parts = self._bytes(degrees, self.stages(degrees).recompute(degrees), in_flight)
        return RankBytes(*parts[:, parts.sum(axis=0).argmax()].tolist())

    def _bytes(self, degrees: Degrees, recompute: StageRecompute, in_flight: tuple[float, ...] | None) -> Numbers:
        """Return the fields of `RankBytes` by rank; if the recompute has several rows, by row and rank."""
        at, m = self.stages(degrees), degrees.micro_batches
        if in_flight is None:
            in_flight = (1.0,)
            if degrees.pp > 1:
                in_flight = live(degrees.schedule, degrees.pp, degrees.stages, m)
        activations = np.array(in_flight) * at.by_rank(recompute.saved)
        buffers = at.most_by_rank(at.sums.most(at.work.touched) + recompute.inside)
        if degrees.pp > 1:  # torch keeps a receive buffer for every micro-batch
            buffers = buffers + m * at.by_rank(at.sums.received)
        state = self.state(degrees)
        buffers = buffers + state.buffers
        if degrees.zero_stage == 3:  # the running operator's parameter and its gradient, whole
            widest = (at.sums.held.astype(bool) * at.elements * at.itemsizes).max(axis=1)
            buffers = buffers + 2 * at.most_by_rank(widest)
        return np.stack(np.broadcast_arrays(*state.held, activations, buffers))

    def fewest_layers(self, degrees: Degrees, limit: float, *, least: bool = False) -> Degrees | None:
        """Return the degrees with the fewest layers recomputed on each rank that fit; None: they do not fit.

        A rank's memory does not depend on what the others recompute, and recompute only takes time: so no other choice
        of layers is faster. least: as `least_memory`.
        """
        at = self.stages(degrees)
        in_flight = (1.0,) * degrees.pp if least else None
        fits = self._bytes(degrees, at.recompute_rows(degrees.recompute), in_flight).sum(axis=0) <= limit
        if not fits.any(axis=0).all():
            return None
        counts = fits.argmax(axis=0)
        if degrees.recompute == NONE or (counts >= at.layers_of_ranks).all():
            return replace(degrees, recompute_layers=())
        return replace(degrees, recompute_layers=tuple(counts.tolist()))

    def recomputed(self, degrees: Degrees) -> tuple[str, ...]:
        """Return the paths of the layers that are recomputed; those of neighbours as a range of numbers."""
        at = self.stages(degrees)
        return ranges(at.sums.recomputed(at.counts(degrees)))

    def least_memory(self, degrees: Degrees) -> float:
        """Return a lower bound of the memory, without the schedule: one micro-batch is in flight."""
        return self.memory(degrees, (1.0,) * degrees.pp).total

    def least_activations(self, degrees: Degrees) -> float:
        """Return a lower bound of a rank's activations, without a plan on its mesh.

        Whatever the plan, each kept tensor has at least its part of the ranks of a replica, and some rank has as much
        as the mean.
        """
        work = self.planner.work(degrees.rows, 1, 1, 1)
        saved = work.kept[degrees.recompute].saved[work.sequence].sum()
        return float(saved / (degrees.replica * degrees.pp))

    def _state_of(self, shared: Degrees, zero_stage: int) -> ReplicatedState:
        at, costs = self._stages(shared), self.planner.costs(shared.dp, shared.replica)

        def collective(kind: str, nbytes: float) -> float:
            return costs.seconds(kind, nbytes, 0)

        inner = at.work.plan.costs

        def weights_of(itemsize: int, summed_over: tuple[int, ...]) -> Weights:
            alike = [(each.itemsize, each.summed_over) == (itemsize, summed_over) for each in at.work.parameters]
            return Weights(
                elements=np.asarray(at.sums.held @ np.where(alike, at.elements, 0.0), dtype=np.float64),
                own=np.asarray(at.sums.held @ np.where(alike, at.own, 0.0), dtype=np.float64),
                itemsize=itemsize,
                replicas=shared.dp,
                collective=collective,
                further_sums=[partial(_summed, inner, dim) for dim in summed_over],
            )

        kinds = sorted({(each.itemsize, each.summed_over) for each in at.work.parameters})
        weights = [weights_of(*kind) for kind in kinds]
        return ReplicatedState(
            weights=weights,
            ranks_of_stages=at.ranks.tolist(),
            layers=at.sums.layers.tolist(),
            micro_batches=shared.micro_batches,
            zero_stage=zero_stage,
            under_backward=shared.sums_under_backward,
            masters=self._masters,
            runtime=PLANNED,
            stream=self.costs.stream,
        )


class _Stages:
    """The stages of a pipeline for degrees that differ only in recompute and ZeRO stage."""

    def __init__(self, evaluation: Evaluation, shared: Degrees) -> None:
        self._shared = shared
        sharing = shared.cp_exchange, shared.cp_groups
        sizes = shared.rows, shared.tp, shared.dp, shared.ep, shared.cp
        self.work: OperatorCosts = evaluation.planner.work(*sizes, sharing)
        self.sums: StageSums = evaluation.sums(self.work, shared.stages)
        several = shared.pp > 1
        ranks = stages_of(shared.schedule, shared.pp, shared.stages) if several else (0,) * shared.stages
        self.ranks = np.array(ranks)
        inside = shared.pp * shared.replica * shared.dp <= evaluation.hardware.collectives.domain
        self.hop = evaluation.costs.send(self.sums.sent, inside=inside) if several else 0.0
        parameters = self.work.parameters
        self.elements = np.array([parameter.elements for parameter in parameters], dtype=float)
        self.itemsizes = np.array([parameter.itemsize for parameter in parameters], dtype=float)
        self.own = np.array([slice_elements(parameter.shape, shared.dp) for parameter in parameters], dtype=float)
        self.recompute_rows = partial(evaluation.recompute_rows, self.sums)
        self._times = cache(self._times_of)

    def times(self, state: ReplicatedState, degrees: Degrees) -> tuple[Numbers, Numbers]:
        """Return the seconds of forward and backward of each stage, with what a micro-batch sends and adds."""
        return self._times(state, degrees.recompute, degrees.recompute_layers)

    def stage_passes(self, degrees: Degrees) -> tuple[Numbers, Numbers]:
        """Return the seconds of forward and backward of each stage, with collectives and recompute."""
        return self._passes_of(degrees.recompute, degrees.recompute_layers)

    def recompute(self, degrees: Degrees) -> StageRecompute:
        """Return, by stage, what backward keeps and runs again."""
        return self.recompute_rows(degrees.recompute).rows(self.counts(degrees))

    def counts(self, degrees: Degrees) -> Counts:
        """Return the number of layers of each stage that are recomputed."""
        return self._counts(degrees.recompute_layers)

    def _counts(self, of_ranks: tuple[int, ...]) -> Counts:
        everything = np.full(len(self.ranks), len(self.work.sequence))
        return np.array(of_ranks)[self.ranks] if of_ranks else everything

    @property
    def layers_of_ranks(self) -> Numbers:
        """The most layers of one of each rank's stages."""
        return self.most_by_rank(self.sums.layers.astype(float))

    def by_rank(self, stages: Numbers) -> Numbers:
        """Return the sums over each rank's stages, the last dimension."""
        found = np.zeros((*stages.shape[:-1], self._shared.pp))
        np.add.at(found.T, self.ranks, stages.T)
        return found

    def most_by_rank(self, stages: Numbers) -> Numbers:
        """Return the most of each rank's stages, the last dimension."""
        found = np.zeros((*stages.shape[:-1], self._shared.pp))
        np.maximum.at(found.T, self.ranks, stages.T)
        return found

    def _times_of(self, state: ReplicatedState, kind: str, of_ranks: tuple[int, ...]) -> tuple[Numbers, Numbers]:
        return state.passes(*self._passes_of(kind, of_ranks))

    def _passes_of(self, kind: str, of_ranks: tuple[int, ...]) -> tuple[Numbers, Numbers]:
        work, again = self.work, self.recompute_rows(kind).rows(self._counts(of_ranks)).again
        return (
            self.sums.sum(work.forward + work.forward_sent),
            self.sums.sum(work.backward + work.backward_sent) + again,
        )


def _summed(costs: MeshCosts, dim: int, nbytes: float) -> float:
    return costs.seconds(ALL_REDUCE, nbytes, dim)


def ranges(paths: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of paths that end in a number: neighbours as one, such as "layers.0-3"."""
    pairs = [path.rpartition(".") for path in paths]
    rows = groupby(enumerate(pairs), lambda item: (item[1][:2], int(item[1][2]) - item[0]))
    found = []
    for (stem, _), row in rows:
        numbers = [pair[2] for _, pair in row]
        found.append("".join(stem) + (f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else numbers[0]))
    return tuple(found)


def slice_elements(shape: Shape, ranks: int) -> int:
    """Return the elements of the first rank's slice (`partition`): the longest dimension is cut, rounded up."""
    if not shape:
        return 1
    longest = max(shape)
    return prod(shape) // longest * ceil(longest / ranks) if longest else 0


def _shared(degrees: Degrees) -> Degrees:
    """Return the degrees without recompute and ZeRO: the key of what others share."""
    return replace(degrees, recompute=NONE, recompute_layers=(), zero_stage=0)
