"""Split a layer's pass into parts that are timed alone, and predict the pass from the times of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, Matmul
from ascend_parallel.ops.chunked import start_gathers
from ascend_parallel.ops.collectives import all_gather_single, reduce_scatters
from ascend_parallel.ops.pending import NamedWork
from ascend_parallel.ops.rows import Sizes, is_one_gather
from ascend_parallel.overlap.layer_shape import BACKWARD, LayerOperator
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall, makespan_beside

PIECES = 8  # pieces of a collective and of a matmul whose cost is measured
LATENCY_ROWS = 16
MOST_AT_ONCE = 16  # collectives in flight at most beside the timed matmuls
LONGEST_BESIDE = 0.25  # seconds of matmuls at most, on a machine that is so busy that a collective takes long
BESIDE = 0.33  # matmul seconds per second of collective when both are timed: matmuls may slow down three times
LEAST_RATE = 0.1  # least share of its own speed that a lane keeps while the other runs
LAUNCH = 20e-6  # host seconds per launch, as benchmarks/host_cost.py measures it on a CPU


@dataclass(frozen=True, kw_only=True)
class PassBreakdown:
    """The measured parts of a pass; seconds are medians on the slowest rank.

    rows
        Rows that are split into chunks.
    matmul, matmul_piece
        The whole matmul, and one launch on 1 / `count` of its rows.
    latency
        The collective of 16 rows.
    collective, pieces
        The collective as one call, and as `count` calls on pieces of the rows that are all in flight.
    gather, gather_pieces
        The same for the all-gather of the layer's input in a column layer's sequence-parallel backward.
    compute_rate, collective_rate
        Share of its own speed that a matmul or a collective keeps while both run.
    """

    rows: int
    count: int
    matmul: float
    matmul_piece: float
    latency: float
    collective: float
    pieces: float
    weight_gradient: float = 0.0
    gather: float = 0.0
    gather_pieces: float = 0.0
    compute_rate: float = 1.0
    collective_rate: float = 1.0

    @property
    def computation(self) -> float:
        """Seconds of all matmuls of the pass."""
        return self.matmul + self.weight_gradient

    @property
    def communication(self) -> float:
        """Seconds of all collectives of the pass; each counts as one call or as pieces in flight, the faster."""
        return min(self.collective, self.pieces) + min(self.gather, self.gather_pieces)


@dataclass(frozen=True)
class Calls:
    """The parts of one pass as functions to time on one rank.

    timed: functions by the name of their field of `PassBreakdown`. piece: runs the matmul of one piece. start: starts
    all pieces of the collective and returns a function that waits for them.
    """

    rows: int
    count: int
    timed: dict[str, Callable[[], object]]
    piece: Callable[[], object]
    start: Callable[[], Callable[[], object]]


def part_calls(
    operator: LayerOperator, group: dist.ProcessGroup, like: torch.Tensor, gathered_columns: int | None
) -> Calls:
    """Return the parts of `operator` on operands of its shapes.

    like: a tensor of the layer's dtype and device. gathered_columns: columns of the layer input that backward
    gathers, or None.
    """
    matmul = operator.matmul
    columns, rows = matmul.k if matmul.operator == ALL_GATHER else matmul.n, matmul.rows
    count = min(PIECES, rows)
    cuts = {"latency": (min(rows, LATENCY_ROWS),), "collective": (rows,), "pieces": _even(rows, count)}
    collective = Collective(matmul.operator, group, like, rows, columns)
    timed: dict[str, Callable[[], object]] = {name: partial(collective.run, sizes) for name, sizes in cuts.items()}
    # Write the operands: untouched pages would all map to the same page of zeros.
    x, w = like.new_ones(matmul.m, matmul.k), like.new_ones(matmul.k, matmul.n)
    piece = partial(torch.mm, x[: max(matmul.m // count, 1)], w)
    timed |= {"matmul": partial(torch.mm, x, w), "matmul_piece": piece}
    if operator.direction == BACKWARD:
        timed["weight_gradient"] = partial(torch.mm, like.new_ones(matmul.n, matmul.m), x)
    if gathered_columns is not None:
        gather = Collective(ALL_GATHER, group, like, rows, gathered_columns)
        timed |= {"gather": partial(gather.run, (rows,)), "gather_pieces": partial(gather.run, cuts["pieces"])}
    return Calls(rows, count, timed, piece, partial(collective.start, cuts["pieces"]))


class Collective:
    """An operator's collective without its matmul, in chunks of rows, as the kernels run it."""

    def __init__(self, operator: str, group: dist.ProcessGroup, like: torch.Tensor, rows: int, columns: int) -> None:
        """Allocate `rows` rows: rows of the rank's result for a reduce-scatter, of the rank's input otherwise."""
        self._operator, self._group = operator, group
        # Zeros, because repeated sums of other values overflow; zero_() writes them, so that the pages exist.
        self._x = like.new_empty(rows, columns).zero_()
        wide = 0 if operator == ALL_REDUCE else group.size() * rows
        self._whole = like.new_empty(wide, columns).zero_()

    def run(self, sizes: Sizes) -> None:
        """Start all chunks and wait for them."""
        self.start(sizes)()

    def start(self, sizes: Sizes) -> Callable[[], object]:
        """Start all chunks and return a function that waits for them."""
        x, ranks = self._x[: sum(sizes)], self._group.size()
        whole = self._whole[: ranks * sum(sizes)]
        if self._operator == ALL_REDUCE:
            chunks = torch.split_with_sizes(x, sizes)
            works = [dist.all_reduce(x_c, group=self._group, async_op=True) for x_c in chunks]
            return _wait_all([NamedWork("a measured all-reduce", work, self._group, x.device) for work in works])
        if self._operator == ALL_GATHER and len(sizes) == 1:
            work = all_gather_single(whole, x, self._group)
            return NamedWork("a measured all-gather", work, self._group, x.device).wait
        if self._operator == ALL_GATHER:
            return start_gathers(x, self._group, sizes, ALL_GATHER).wait
        starts = reduce_scatters(x, sizes, self._group)
        inputs = torch.split_with_sizes(whole, [ranks * size for size in sizes])
        works = [start(x_c) for start, x_c in zip(starts, inputs, strict=True)]
        return _wait_all([NamedWork("a measured reduce-scatter", work, self._group, x.device) for work in works])


def repeats(piece: float, pieces: float) -> tuple[int, int]:
    """Return how many piece matmuls and how many collectives to time beside each other.

    The matmuls take a third (`BESIDE`) of the collectives' time. piece, pieces: seconds of one matmul of a piece, and
    of the collective in pieces.
    """
    matmuls = max(1, round(min(BESIDE * pieces, LONGEST_BESIDE) / piece))
    return matmuls, min(MOST_AT_ONCE, max(1, ceil(matmuls * piece / BESIDE / pieces)))


def rates(matmuls: float, whole: float, beside: float, until: float) -> tuple[float, float]:
    """Return the share of its own speed that each lane kept: (matmuls, collectives).

    matmuls, whole: seconds of the matmuls alone and of the collectives alone. beside, until: seconds from the common
    start to the end of the matmuls, and to the end of both.
    """
    moved = whole - (until - beside)  # collective work done by the end of the matmuls, in seconds at full speed
    return min(1.0, max(LEAST_RATE, matmuls / beside)), min(1.0, max(LEAST_RATE, moved / beside))


def seconds(matmul: Matmul, breakdown: PassBreakdown, sizes: Sizes) -> float:
    """Predict the seconds of a pass with chunks of `sizes` rows from the times of its parts.

    The matmul of a chunk costs a fixed time plus a time per row, and so does its collective. One collective also costs
    the latency: the first of an all-gather, the last of the others. While both lanes run, each runs at its rate.
    """
    first, whole, blocks = matmul.operator == ALL_GATHER, len(sizes) == 1, 1
    if matmul.operator != ALL_REDUCE:
        blocks = matmul.ranks - 1 if first else matmul.ranks
    fixed = max(breakdown.count * breakdown.matmul_piece - breakdown.matmul, 0.0) / max(breakdown.count - 1, 1)
    per_row = max(breakdown.matmul - fixed, 0.0) / matmul.m
    extra = max(breakdown.pieces - breakdown.collective, 0.0) / max(breakdown.count - 1, 1)
    moving = max(min(breakdown.pieces, breakdown.collective) - breakdown.latency, 0.0) / breakdown.rows
    compute, collective, own = [breakdown.matmul], [breakdown.collective], 0.0
    if is_one_gather(sizes):
        own, compute = fixed + per_row * breakdown.rows, [blocks * (fixed + per_row * breakdown.rows)]
    elif not whole:
        compute = [blocks * (fixed + per_row * size) + 2 * LAUNCH for size in sizes]
        collective = [extra + moving * size for size in sizes]
        collective[0 if first else -1] += breakdown.latency
        own = fixed + per_row * breakdown.rows if first else 0.0
    call = ChunkedCall(
        compute=tuple(compute),
        collective=tuple(collective),
        communicate_first=first,
        own=own,
        before=(breakdown.gather if whole else breakdown.gather_pieces,),
        tail=breakdown.weight_gradient,
    )
    return makespan_beside(call, breakdown.compute_rate, breakdown.collective_rate)


def _even(rows: int, count: int) -> Sizes:
    return tuple(rows // count + (index < rows % count) for index in range(count))


def _wait_all(works: Sequence[Any]) -> Callable[[], object]:
    return lambda: [work.wait() for work in works]
