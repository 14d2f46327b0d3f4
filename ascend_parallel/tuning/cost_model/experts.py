"""Estimate the experts of a layer on one rank: dispatch, experts and combine, one after the other or in groups.

A rank has a compute lane and a link, as a region has (`Lanes`). In groups the tasks start in the order of
ops/part_exchange.py: two dispatches, then each group's experts between the next dispatch and its combine; a shared
expert under the first all-to-all, and the weight gradients of the last group under the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from ascend_parallel.ops.part_exchange import IN_FLIGHT
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.overlap.layer_shape import FORWARD
from ascend_parallel.process_groups.collectives import ALL_GATHER, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import ELEMENTWISE_BACKWARD, CostModel, ranks_in_domain
from ascend_parallel.tuning.cost_model.layer_passes import ChunkSchedule
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.region import Estimate, Lanes, disturbed

# The numbers of groups that schedules without a number of their own try (COC_PARALLEL_NUM=auto: the first three).
GROUPS = (1, 2, 4, 8)
# Row-wide tensors that pass through memory beside the exchange: rows are put in the order of their experts (1 read,
# 1 written), and what came back in the order of tokens, to be summed with the routing weights (1 read, 1 written).
SORT_ACCESSES = 4
# The rows that a group joins before each all-to-all, and places after it: 1 read, 1 written.
COPY_ACCESSES = 2


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """What a pass of a layer's experts does on a rank, whole, in seconds.

    experts
        The experts of the rank.
    send
        Seconds of an all-to-all of a share of the rows.
    compute, tail
        The experts; in backward their input gradients, and apart from them their weight gradients.
    again
        What the last group computes twice, to take its weight gradients apart.
    copy
        Joining the rows of an all-to-all in a group, or placing them.
    """

    experts: int
    send: Callable[[float], float]
    compute: float
    tail: float = 0.0
    again: float = 0.0
    copy: float = 0.0

    @property
    def in_turn(self) -> float:
        """Seconds without groups: dispatch, experts, combine."""
        return 2 * self.send(1.0) + self.compute + self.tail

    def run(self, lanes: Lanes, sizes: Sizes, first: float = 0.0) -> None:
        """Add the pass in groups of `sizes` experts to the lanes; first: seconds under the first all-to-all."""
        shares = [size / self.experts for size in sizes]
        whole = len(sizes) == 1
        copies = [0.0 if whole else self.copy * share for share in shares]

        def run(seconds: float, reads: float = 0.0) -> None:
            if seconds:
                lanes.run(seconds, reads)

        def dispatch(index: int, reads: float = 0.0) -> float:
            run(copies[index], reads)
            return lanes.send(self.send(shares[index]))

        ends = [dispatch(index) for index in range(min(IN_FLIGHT, len(sizes)))]
        run(first)
        combined = 0.0
        for index, share in enumerate(shares):
            if index + IN_FLIGHT < len(sizes):
                ends.append(dispatch(index + IN_FLIGHT, ends[index]))
            last = index == len(sizes) - 1
            run(share * (self.compute if last else self.compute + self.tail), ends[index])
            combined = lanes.send(self.send(share))
        run((self.tail + self.again) * shares[-1])
        run(sum(copies), combined)


def in_groups(costs: CostModel, work: ExchangeWork, sizes: Sizes, first: float = 0.0) -> Estimate:
    """Return the estimate of a pass in groups of `sizes` experts, whose lanes slow each other down."""
    beside = len(sizes) > 1 or bool(first or work.tail)  # else nothing runs beside an all-to-all
    return disturbed(costs, partial(work.run, sizes=sizes, first=first), beside=beside)


class ExpertsTime:
    """The times of the experts of one layer on one rank, of equally loaded experts; seconds per micro-batch."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch) -> None:
        """Set up the experts of `model` as `batch` distributes them."""
        self.costs, self.model, self.batch = costs, model, batch
        self.experts = -(-model.experts // batch.ep)
        self.sent_rows = batch.own_rows * model.top_k
        # Ranks that share an expert's width gather each other's rows.
        self.expert_rows = -(-self.sent_rows * batch.etp * batch.ep // model.experts)
        self.width = -(-model.expert_ffn // batch.etp)
        line = np.arange(batch.ep * batch.etp).reshape(batch.ep, batch.etp).T
        self._inside = ranks_in_domain(line, costs.hardware.collectives.domain)

    @property
    def matrices(self) -> int:
        """The weights of an expert."""
        return 3 if self.model.gated else 2

    @cached_property
    def routing(self) -> float:
        """Seconds of the router's forward, and of sorting the rows and summing what came back."""
        model, batch = self.model, self.batch
        router = self.costs.matmul(batch.own_rows, model.hidden, model.experts, batch.dtype.itemsize)
        return router + self.costs.stream(SORT_ACCESSES * self._row_bytes)

    def work(self, direction: str) -> ExchangeWork:
        """Return the pass's work: each expert's matmuls run by themselves, and its activation at the memory's speed.

        Megatron-core's layers compute both gradients at once, so no weight gradient is put off. A planned model's
        experts run the last group again, so that its weight gradients follow under the last all-to-all (docs/moe.md).
        """
        item, forward = self.batch.dtype.itemsize, direction == FORWARD
        up = self.costs.products(self.expert_rows, self.model.hidden, self.width, item)
        down = self.costs.products(self.expert_rows, self.width, self.model.hidden, item)
        place = 0 if forward else 1
        matmuls = self.experts * ((self.matrices - 1) * up[place] + down[place])
        accesses = self.matrices * self.experts * self.expert_rows * self.width
        activation = self.costs.stream(accesses * item) * (1 if forward else ELEMENTWISE_BACKWARD)
        compute, tail = matmuls + activation, 0.0
        if not forward and self.batch.single_operators:
            compute = tail = compute / 2
        return ExchangeWork(
            experts=self.experts,
            send=self._send,
            compute=compute,
            tail=tail,
            again=tail / self.matrices,
            copy=self.costs.stream(COPY_ACCESSES * self._row_bytes),
        )

    @cached_property
    def all_to_alls(self) -> float:
        """Seconds of a pass's two all-to-alls, whole."""
        return 2 * self._send(1.0)

    def seconds(self, direction: str, schedule: ChunkSchedule, shared: float) -> float:
        """Return the seconds of a pass, with the shared expert's `shared` seconds, which the first all-to-all hides.

        Experts whose width ranks share are not cut into groups (docs/moe.md), nor those of one rank.
        """
        routing = (1 if direction == FORWARD else ELEMENTWISE_BACKWARD) * self.routing
        work = self.work(direction)
        in_turn = work.in_turn + shared
        if work.tail and self.batch.ep > 1:
            in_turn = in_groups(self.costs, work, (self.experts,), 0.0).seconds + shared
        if schedule.name in ("in-turn", "megatron") or self.batch.ep == 1 or self.batch.etp > 1:
            return in_turn + routing
        if schedule.name == "bound":
            return max(work.compute + work.tail + shared, self.all_to_alls) + routing
        return min(self._in_groups(work, count, shared, in_turn) for count in self._counts(schedule)) + routing

    def best_groups(self, direction: str) -> Sizes | None:
        """Return the experts of each of the best groups, without a shared expert; None: nothing is gained."""
        if self.batch.ep == 1 or self.batch.etp > 1:
            return None
        work = self.work(direction)
        count = min(GROUPS, key=lambda each: self._in_groups(work, each, 0.0, work.in_turn))
        return split_rows(self.experts, count, 1)

    def _counts(self, schedule: ChunkSchedule) -> tuple[int, ...]:
        return GROUPS if schedule.name in ("best", "equal") else (int(schedule.name.removeprefix("=")),)

    def _in_groups(self, work: ExchangeWork, count: int, shared: float, in_turn: float) -> float:
        sizes = split_rows(self.experts, count, 1)
        if len(sizes) == 1 and not shared:
            return in_turn
        return in_groups(self.costs, work, sizes, shared).seconds

    @property
    def _row_bytes(self) -> float:
        return float(self.sent_rows * self.model.hidden * self.batch.dtype.itemsize)

    def _send(self, share: float) -> float:
        """Return the seconds of an all-to-all, with the gather, or the reduce-scatter, over the ranks of an expert."""
        batch, size = self.batch, share * self._row_bytes
        exchanged = self.costs.all_to_all(size, batch.ep, self._inside)
        kinds = ALL_GATHER, REDUCE_SCATTER
        widths = sum(self.costs.collective(kind, size * batch.etp, batch.etp) for kind in kinds) / len(kinds)
        return exchanged + widths
