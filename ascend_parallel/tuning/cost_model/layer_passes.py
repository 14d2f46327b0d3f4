"""Compute the times of a tensor-parallel linear layer's passes: in turn, as Megatron-core runs them, and in chunks.

The classes mirror the passes of overlap/linear.py; docs/overlap.md says which operator runs in which pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.overlap.layer_shape import BACKWARD, COLUMN, FORWARD
from ascend_parallel.process_groups.collectives import ALL_GATHER
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall, makespan
from ascend_parallel.tuning.cost_model.chunk_search import ChunkSearchResult, best_sizes, equal_sizes
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.models import ModelLinear


class LinearPass:
    """Forward or backward of one layer on one rank; all times in seconds."""

    def __init__(self, costs: CostModel, linear: ModelLinear, direction: str, *, gathers_again: bool = True) -> None:
        """Set up the pass `direction` ("forward" or "backward") of `linear`.

        gathers_again: a column layer's backward gathers the rows of its input (`recompute_all_gather`).
        """
        self.costs, self.linear, self.direction = costs, linear, direction
        self.shape = shape = linear.shape
        forward = direction == FORWARD
        self.beside: Matmul | None = linear.matmul(direction)
        m, k, item = shape.rows, shape.k, shape.dtype.itemsize
        widths = (shape.n,) if self.beside else linear.products  # products beside a collective run as one
        self.matmul = sum(costs.matmul(m, *((k, n) if forward else (n, k)), item) for n in widths)
        self.tail = 0.0 if forward else sum(costs.matmul(n, m, k, item) for n in widths)
        self.gathers_input = gathers_again and not forward and shape.kind == COLUMN and shape.sequence_parallel

    @property
    def computation(self) -> float:
        """Seconds of the pass's matmuls, in one chunk."""
        return self.matmul + self.tail

    @cached_property
    def communication(self) -> float:
        """Seconds of the pass's collectives, in one chunk."""
        if self.beside is None:
            return 0.0
        collective = self.costs.chunk(self.beside, self.beside.rows, True)[1]
        return collective + (self._gather() if self.gathers_input else 0.0)

    @property
    def in_turn(self) -> float:
        """Seconds without any overlap: computation + communication."""
        return self.computation + self.communication

    @cached_property
    def megatron(self) -> float:
        """Seconds as Megatron-core runs the pass: one chunk; the column layer's backward overlaps its collectives."""
        return self.computation if self.beside is None else self.seconds((self.beside.rows,))

    @cached_property
    def bound(self) -> float:
        """The lower bound of the seconds, for all chunk sizes."""
        if self.beside is None:
            return self.computation
        return self.costs.bound(self.beside, tail=self.tail, gathers_input=self.gathers_input)

    @cached_property
    def best(self) -> ChunkSearchResult | None:
        """The best chunk sizes, or None if the pass has no collective."""
        return None if self.beside is None else best_sizes(self.beside.rows, self.seconds)

    def call(self, sizes: Sizes) -> ChunkedCall:
        """Return the durations of the pass in chunks of `sizes` rows."""
        if self.beside is None:
            raise ValueError(f"{self.linear.name}, {self.direction}: the pass has no collective, so it has no chunks")
        return self.costs.call(self.beside, sizes, tail=self.tail, gathers_input=self.gathers_input)

    def seconds(self, sizes: Sizes) -> float:
        """Return the time of the pass in chunks of `sizes` rows."""
        return makespan(self.call(sizes))

    def _gather(self) -> float:
        assert self.beside is not None
        size = self.beside.m * self.beside.n * self.beside.dtype.itemsize
        return self.costs.collective(ALL_GATHER, size, self.beside.ranks)


@dataclass(frozen=True, kw_only=True)
class ChunkSchedule:
    """A named rule for the chunk sizes of passes.

    name
        in-turn, megatron, bound, best, equal (best equal chunks), a count for `split_rows` ("4"), or a count of equal
        chunks ("=4").
    region
        Run what stands between two attentions as a region, in the chunks of `name`, which is a count.
    column_backward
        False runs the column layer's backward as Megatron-core does, which is the default of fused operators.
    """

    name: str
    column_backward: bool = True
    region: bool = False

    def seconds(self, part: LinearPass) -> float:
        """Return the time of `part` under this schedule."""
        if part.beside is None:
            return part.computation
        column_backward = part.direction == BACKWARD and part.shape.kind == COLUMN
        if column_backward and not self.column_backward and self.name != "in-turn":
            return part.megatron
        if self.name in ("in-turn", "megatron", "bound"):
            return float(getattr(part, self.name.replace("-", "_")))
        if self.name in ("best", "equal"):
            assert part.best is not None
            return part.best.seconds if self.name == "best" else part.best.equal_seconds
        return part.seconds(self._cut(part.beside.rows))

    def _cut(self, rows: int) -> Sizes:
        if self.name.startswith("="):
            return equal_sizes(rows, int(self.name[1:]))
        return split_rows(rows, int(self.name))


IN_TURN = ChunkSchedule(name="in-turn")
MEGATRON = ChunkSchedule(name="megatron")
BOUND = ChunkSchedule(name="bound")
BEST = ChunkSchedule(name="best")
EQUAL = ChunkSchedule(name="equal")


def operator_of(part: LinearPass) -> str:
    """Return the name of the pass's operator, for display."""
    if part.beside is None:
        return "matmul"
    return part.beside.operator + (" + gather" if part.gathers_input else "")
