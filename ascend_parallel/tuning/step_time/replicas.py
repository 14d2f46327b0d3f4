"""The parameters of a pipeline's ranks in a step, shared among replicas by ZeRO: what is held, moved and sent.

`predict` describes the weights of a transformer by its dimensions, plan-training those of a planned graph. All that
follows from them is decided here: bytes, buckets, sums, gathers and updates, and so the step's `StepWork`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.step_time.rank_bytes import gradient_bytes, optimizer_bytes, zero_bytes
from ascend_parallel.tuning.step_time.runtimes import CLIPPED, WIDE, Runtime
from ascend_parallel.tuning.step_time.step import StepWork, exposed, gathered_pass

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Weights that the same ranks hold, by stage.

    elements, own
        Elements before, and of the fullest rank's shards after they are partitioned over the replicas.
    collective
        The seconds of a collective of so many bytes over the replicas.
    further_sums
        The same of all-reduces over further ranks that hold these weights, which ZeRO does not partition: each runs
        over the sums of the lines before, once in a step.
    """

    elements: Numbers
    own: Numbers
    itemsize: int
    replicas: int
    collective: Callable[[str, float], float]
    further_sums: Sequence[Callable[[float], float]] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicatedState:
    """The parameters of a pipeline's ranks, with their gradients and Adam's states, in a step of `micro_batches`.

    ranks_of_stages
        The rank of each stage, from 0.
    layers
        By stage: ZeRO 3 gathers the weights in so many parts, each under the layer before.
    masters
        Whether 16-bit weights have fp32 masters; otherwise the states have the weights' dtype.
    adds_inside
        A micro-batch's gradient is added to its fp32 sum inside its matmul.
    wide_gradients
        Whether 16-bit gradients add up in fp32; None: where several backwards add up, and as the runtime does.
    stream
        The seconds of moving so many bytes of device memory.
    """

    weights: Sequence[Weights]
    ranks_of_stages: Sequence[int]
    layers: Sequence[int]
    micro_batches: int
    zero_stage: int
    under_backward: bool
    masters: bool
    runtime: Runtime
    stream: Callable[[float], float]
    adds_inside: bool = False
    wide_gradients: bool | None = None

    @property
    def ranks(self) -> int:
        """The ranks of the pipeline."""
        return max(self.ranks_of_stages) + 1

    def by_rank(self, stages: Numbers) -> Numbers:
        """Return the sums over each rank's stages."""
        return np.bincount(self.ranks_of_stages, weights=stages, minlength=self.ranks).astype(np.float64)

    def gradient_size(self, itemsize: int) -> int:
        """Return the bytes of a gradient's element."""
        return gradient_bytes(itemsize, self.zero_stage, wide=self._wide)

    @property
    def _wide(self) -> bool:
        if self.wide_gradients is not None:
            return self.wide_gradients
        return self.runtime.wide_gradients or self.micro_batches > 1

    def optimizer_size(self, itemsize: int) -> int:
        """Return the optimizer's bytes for an element."""
        return int(optimizer_bytes(float(itemsize), float(max(itemsize, WIDE)) if self.masters else None))

    def step_work(self, forward: Numbers, backward: Numbers, *, schedule: str, send: float) -> StepWork:
        """Return the ranks' work in a step; forward and backward: of each stage, of a micro-batch (`passes`)."""
        sums, buckets, gathers, update = self.ends
        return StepWork(
            schedule=schedule,
            micro_batches=self.micro_batches,
            forward=forward.tolist(),
            backward=backward.tolist(),
            send=send,
            sums=sums.tolist(),
            buckets=buckets,
            under_backward=self.under_backward,
            gathers=gathers.tolist(),
            optimizer=update.tolist(),
        )

    def passes(self, forward: Numbers, backward: Numbers) -> tuple[Numbers, Numbers]:
        """Return the seconds of each stage's passes with what each micro-batch adds.

        All: the addition of its gradients to their sums. ZeRO 2 and 3 hold no whole gradients between two backwards, so
        each backward ends with their reduce-scatter (DeepSpeed's stage 2, and FSDP's outside of `no_sync`, too). ZeRO 3
        gathers each layer's weights for both passes, under the layer before.
        """
        backward = backward + self.accumulated
        if self.zero_stage < 2 or not any(each.replicas > 1 for each in self.weights):
            return forward, backward
        scatter = self._by_stage(REDUCE_SCATTER, self.gradient_size if self.zero_stage == 2 else int)
        if not self.runtime.hides_partitions:
            gather = self._by_stage(ALL_GATHER, int) if self.zero_stage == 3 else np.zeros_like(scatter)
            return forward + gather, backward + gather + scatter
        if self.zero_stage == 2:
            buckets = self._bucket_counts(by_stage=True)
            added = [
                exposed(sums, count, seconds) if self.under_backward else sums
                for sums, count, seconds in zip(scatter, buckets, backward, strict=True)
            ]
            return forward, backward + np.array(added)
        gather, layers = self._by_stage(ALL_GATHER, int), [max(1, count) for count in self.layers]
        each = list(zip(layers, forward, backward, gather, scatter, strict=True))
        return (
            np.array([gathered_pass(n, first / n, gathered / n) for n, first, _, gathered, _ in each]),
            np.array([gathered_pass(n, last / n, gathered / n, sent / n) for n, _, last, gathered, sent in each]),
        )

    @cached_property
    def accumulated(self) -> Numbers:
        """Seconds, by stage, in which a micro-batch's gradients are added to their fp32 sums.

        Read both, write the sum (Megatron-core's main_grad; torch's accumulation into `.grad`).
        """
        found = np.zeros(len(self.ranks_of_stages))
        if self.adds_inside or not (self._wide or self.micro_batches > 1):
            return found
        for each in self.weights:
            added = each.own if self.zero_stage >= 2 else each.elements
            found += added * (each.itemsize + 2 * WIDE)
        return np.array([self.stream(float(moved)) for moved in found])

    @cached_property
    def ends(self) -> tuple[Numbers, list[int], Numbers, Numbers]:
        """By rank: seconds of the sums after, or under, the last backward, their buckets, gathers, and the update."""
        none, scatters = np.zeros(self.ranks), self.zero_stage == 1 and self.runtime.scatters_sums
        sums, buckets = none, [1] * self.ranks
        if self.zero_stage <= 1:
            sums = self._by_rank(REDUCE_SCATTER if scatters else ALL_REDUCE, self.gradient_size)
            buckets = self._bucket_counts(by_stage=False)
        sums = sums + self._further_sums
        gathers = self._by_rank(ALL_GATHER, int) if self.zero_stage in (1, 2) else none
        return sums, buckets, gathers, self._update

    @property
    def _further_sums(self) -> Numbers:
        """Seconds, by rank, of the all-reduces over ranks that are no replicas of ZeRO."""
        found = np.zeros(self.ranks)
        for each in self.weights:
            held = each.own if self.zero_stage >= 2 else each.elements
            bucket, sizes = self.runtime.bucket(each.replicas), self.by_rank(held) * self.gradient_size(each.itemsize)
            for seconds in each.further_sums:
                for rank, nbytes in enumerate(sizes):
                    count = max(1, ceil(nbytes / bucket))
                    found[rank] += count * seconds(float(nbytes) / count) if nbytes else 0.0
        return found

    @property
    def _update(self) -> Numbers:
        moved = np.zeros(len(self.ranks_of_stages))
        for each in self.weights:
            gradient = self.gradient_size(each.itemsize)
            own = each.own if self.zero_stage and each.replicas > 1 else each.elements
            clipped = CLIPPED if self.runtime.clips else 0
            # Zeros into the gradients for the next step; torch's zero_grad sets them to None.
            zeroed = each.elements * (gradient if self.runtime.clips else 0)
            moved = moved + own * (clipped + self._adam_bytes(each.itemsize, gradient)) + zeroed
        return np.array([self.stream(float(size)) for size in self.by_rank(moved)])

    def _adam_bytes(self, itemsize: int, gradient: int) -> int:
        """Return the bytes of Adam: the gradient read, states and weight read and written.

        A 16-bit weight with a master is written from the master, which is read once more (Megatron-core 0.12.1,
        optimizer/optimizer.py).
        """
        states = self.optimizer_size(itemsize)
        if not self.masters:  # the states have no copy of the weight
            return gradient + 2 * states + 2 * itemsize
        return gradient + 2 * states + (WIDE + itemsize if itemsize < WIDE else 0)

    @cached_property
    def held(self) -> tuple[Numbers, ...]:
        """The bytes of parameters, gradients and optimizer by rank: ZeRO (arXiv:1910.02054, figure 1)."""
        found = np.zeros((3, self.ranks))
        for each in self.weights:
            sizes = each.itemsize, self.gradient_size(each.itemsize), self.optimizer_size(each.itemsize)
            elements, own = self.by_rank(each.elements), self.by_rank(each.own)
            found += np.array(zero_bytes(elements, own if self.zero_stage else elements, self.zero_stage, sizes))
        return tuple(found)

    @cached_property
    def buffers(self) -> Numbers:
        """The bytes of the buckets in use, by rank."""
        found = np.zeros(self.ranks)
        for each in self.weights:
            size = self.by_rank(each.elements) * self.gradient_size(each.itemsize)
            bucket = self.runtime.bucket(each.replicas)
            found += self.runtime.buckets_held * np.minimum(bucket, size) * (each.replicas > 1)
        return found

    def _by_rank(self, kind: str, size: Callable[[int], int]) -> Numbers:
        return self._collectives(kind, size, self.by_rank)

    def _by_stage(self, kind: str, size: Callable[[int], int]) -> Numbers:
        return self._collectives(kind, size, lambda stages: stages)

    def _collectives(self, kind: str, size: Callable[[int], int], placed: Callable[[Numbers], Numbers]) -> Numbers:
        """Return the seconds of a collective over the replicas of all weights, in buckets of equal size.

        size: the bytes of an element, by the bytes of a weight's.
        """
        seconds = np.zeros(len(placed(np.zeros(len(self.ranks_of_stages)))))
        for each in self.weights:
            if each.replicas > 1:
                bucket = self.runtime.bucket(each.replicas)
                for place, nbytes in enumerate(placed(each.elements) * size(each.itemsize)):
                    count = max(1, ceil(nbytes / bucket))
                    seconds[place] += count * each.collective(kind, float(nbytes) / count)
        return seconds

    def _bucket_counts(self, *, by_stage: bool) -> list[int]:
        counts = np.zeros(len(self.ranks_of_stages) if by_stage else self.ranks)
        for each in self.weights:
            elements = each.elements if by_stage else self.by_rank(each.elements)
            size = elements * self.gradient_size(each.itemsize)
            counts += size / self.runtime.bucket(each.replicas)
        return [max(1, ceil(count)) for count in counts]
