"""A tensor-parallel linear layer's forward and backward: in turn, as Megatron-core runs them, and in the best chunks.

Which operator runs where stands in docs/overlap.md; the functions here are `linear.py` in times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall, makespan
from ascend_parallel.tuning.cost_model.chunk_search import Best, best_sizes, equal_sizes
from ascend_parallel.tuning.cost_model.cost import GATHER, CostModel
from ascend_parallel.tuning.cost_model.models import COLUMN, Linear

FORWARD, BACKWARD = "forward", "backward"


class LinearPass:
    """One direction of one layer on one rank; all times in seconds."""

    def __init__(self, costs: CostModel, linear: Linear, direction: str) -> None:
        """Take `direction` "forward" or "backward" of `linear`."""
        self.costs, self.linear, self.direction = costs, linear, direction
        forward = direction == FORWARD
        self.problem: Problem | None = linear.forward_problem() if forward else linear.backward_problem()
        item = linear.dtype.itemsize
        k, n = (linear.k, linear.n) if forward else (linear.n, linear.k)
        self.matmul = costs.matmul(linear.m, k, n, item)
        self.tail = 0.0 if forward else costs.matmul(linear.n, linear.m, linear.k, item)
        self.gathers_again = not forward and linear.kind == COLUMN and linear.sequence_parallel

    @property
    def computation(self) -> float:
        """Matmuls of this pass, whole."""
        return self.matmul + self.tail

    @cached_property
    def communication(self) -> float:
        """Collectives of this pass, whole."""
        if self.problem is None:
            return 0.0
        collective = self.costs.chunk(self.problem, self.problem.rows, True)[1]
        return collective + (self._gather() if self.gathers_again else 0.0)

    @property
    def in_turn(self) -> float:
        """Everything one after the other."""
        return self.computation + self.communication

    @cached_property
    def megatron(self) -> float:
        """As Megatron-core runs it: whole, in backward of the column layer its collectives beside the matmuls."""
        return self.computation if self.problem is None else self.seconds((self.problem.rows,))

    @cached_property
    def bound(self) -> float:
        """What no cutting gets below."""
        if self.problem is None:
            return self.computation
        return self.costs.bound(self.problem, tail=self.tail, gathers_again=self.gathers_again)

    @cached_property
    def best(self) -> Best | None:
        """The best chunks, or None where nothing communicates."""
        return None if self.problem is None else best_sizes(self.problem.rows, self.seconds)

    def call(self, sizes: Sizes) -> ChunkedCall:
        """Return the pass cut into `sizes`, as durations."""
        if self.problem is None:
            raise ValueError(f"{self.linear.name}, {self.direction}: nothing communicates, so nothing is cut")
        return self.costs.call(self.problem, sizes, tail=self.tail, gathers_again=self.gathers_again)

    def seconds(self, sizes: Sizes) -> float:
        """Return the time of the pass cut into `sizes`."""
        return makespan(self.call(sizes))

    def _gather(self) -> float:
        assert self.problem is not None
        size = self.problem.m * self.problem.n * self.problem.dtype.itemsize
        return self.costs.collective(GATHER, size, self.problem.ranks)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How passes are run: the way to their sizes, told by a name.

    in-turn, megatron, bound, best, equal (best equal chunks), or a count as split_rows cuts it ("4") or
    of equal chunks ("=4"). column_backward=False leaves the column layer's backward as Megatron-core runs
    it, which is the fused operators' default.
    """

    name: str
    column_backward: bool = True

    def seconds(self, part: LinearPass) -> float:
        """Return the time of `part` run so."""
        if part.problem is None:
            return part.computation
        column_backward = part.direction == BACKWARD and part.linear.kind == COLUMN
        if column_backward and not self.column_backward and self.name != "in-turn":
            return part.megatron
        if self.name in ("in-turn", "megatron", "bound"):
            return float(getattr(part, self.name.replace("-", "_")))
        if self.name in ("best", "equal"):
            assert part.best is not None
            return part.best.seconds if self.name == "best" else part.best.equal_seconds
        return part.seconds(self._cut(part.problem.rows))

    def _cut(self, rows: int) -> Sizes:
        if self.name.startswith("="):
            return equal_sizes(rows, int(self.name[1:]))
        return split_rows(rows, int(self.name))


IN_TURN = Schedule(name="in-turn")
MEGATRON = Schedule(name="megatron")
BOUND = Schedule(name="bound")
BEST = Schedule(name="best")
EQUAL = Schedule(name="equal")


def passes(costs: CostModel, linear: Linear) -> list[LinearPass]:
    """Return forward and backward of a layer."""
    return [LinearPass(costs, linear, direction) for direction in (FORWARD, BACKWARD)]


def operator_of(part: LinearPass) -> str:
    """Name what the pass runs, for a person."""
    if part.problem is None:
        return "matmul"
    return part.problem.operator + (" + gather" if part.gathers_again else "")
