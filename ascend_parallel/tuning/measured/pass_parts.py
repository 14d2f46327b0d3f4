"""What a layer's pass is made of: its parts, each to be timed alone, and the pass predicted from their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.chunked import start_gathers
from ascend_parallel.ops.collectives import all_gather_single, reduce_scatters
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.choices import LayerOperator
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall, makespan_beside

PIECES = 8  # into which a collective and a matmul are cut to see what a piece costs
LATENCY_ROWS = 16
MOST_AT_ONCE = 16  # collectives started one after the other to cover a matmul
BESIDE = 0.33  # of the collective that matmuls run beside: they may take three times as long there
LEAST_RATE = 0.1  # of its own speed that a lane keeps beside the other
LAUNCH = 20e-6  # host seconds per launch, as benchmarks/host_cost.py measures it on a CPU


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a pass is made of; seconds are medians on the slowest rank.

    rows
        Rows that are cut.
    matmul, matmul_piece
        The whole, and one launch of a piece of its rows.
    latency
        The collective of 16 rows.
    collective, pieces
        The whole collective in one, and in `count` pieces of the same rows that are all in flight.
    gather, gather_pieces
        The same for the layer's input, which a column layer's sequence-parallel backward gathers again.
    compute_rate, collective_rate
        Share of its own speed that matmul and collective keep while both run.
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
        """All matmuls of the pass."""
        return self.matmul + self.weight_gradient

    @property
    def communication(self) -> float:
        """All collectives of the pass, whole or in pieces, as they are faster."""
        return min(self.collective, self.pieces) + min(self.gather, self.gather_pieces)


@dataclass(frozen=True)
class Calls:
    """The parts of one pass, ready to be called on one rank.

    timed: by the name of the field of `Parts`. piece: one matmul of a piece. start: starts all pieces of the
    collective and returns what waits for them.
    """

    rows: int
    count: int
    timed: dict[str, Callable[[], object]]
    piece: Callable[[], object]
    start: Callable[[], Callable[[], object]]


def part_calls(one: LayerOperator, group: dist.ProcessGroup, like: torch.Tensor, regathers: int | None) -> Calls:
    """Make operands of the shapes of `one` and the calls on them.

    like: a tensor of the layer's dtype and device. regathers: columns of the input gathered again, or None.
    """
    columns = one.k if one.operator == ALL_GATHER else one.n
    rows = one.m if one.operator == ALL_REDUCE else one.m // group.size()
    count = min(PIECES, rows)
    cuts = {"latency": (min(rows, LATENCY_ROWS),), "collective": (rows,), "pieces": _even(rows, count)}
    alone = Collective(one.operator, group, like, rows, columns)
    timed: dict[str, Callable[[], object]] = {name: partial(alone.run, sizes) for name, sizes in cuts.items()}
    # Ones: pages that were only asked for would all be the same page of zeros.
    x, w = like.new_ones(one.m, one.k), like.new_ones(one.k, one.n)
    piece = partial(torch.mm, x[: max(one.m // count, 1)], w)
    timed |= {"matmul": partial(torch.mm, x, w), "matmul_piece": piece}
    if one.run == "backward":
        timed["weight_gradient"] = partial(torch.mm, like.new_ones(one.n, one.m), x)
    if regathers is not None:
        again = Collective(ALL_GATHER, group, like, rows, regathers)
        timed |= {"gather": partial(again.run, (rows,)), "gather_pieces": partial(again.run, cuts["pieces"])}
    return Calls(rows, count, timed, piece, partial(alone.start, cuts["pieces"]))


class Collective:
    """An operator's collective alone, in chunks of rows, as the kernels run it."""

    def __init__(self, operator: str, group: dist.ProcessGroup, like: torch.Tensor, rows: int, columns: int) -> None:
        """Take up to `rows` rows: of the result's own for a reduce-scatter, of the rank's input else."""
        self._operator, self._group = operator, group
        # Zeros, because reducing anything else again and again would overflow; written, so that they are in memory.
        self._x = like.new_empty(rows, columns).zero_()
        wide = 0 if operator == ALL_REDUCE else group.size() * rows
        self._whole = like.new_empty(wide, columns).zero_()

    def run(self, sizes: Sizes) -> None:
        """Run all chunks, at the same time if the backend can."""
        self.start(sizes)()

    def start(self, sizes: Sizes) -> Callable[[], object]:
        """Start all chunks and return what waits for them."""
        x, ranks = self._x[: sum(sizes)], self._group.size()
        whole = self._whole[: ranks * sum(sizes)]
        if self._operator == ALL_REDUCE:
            chunks = torch.split_with_sizes(x, sizes)
            return _waiting([dist.all_reduce(x_c, group=self._group, async_op=True) for x_c in chunks])
        if self._operator == ALL_GATHER and len(sizes) == 1:
            return all_gather_single(whole, x, self._group).wait
        if self._operator == ALL_GATHER:
            return start_gathers(x, self._group, sizes, ALL_GATHER)[0].wait
        scatters = reduce_scatters(x, sizes, self._group)
        for scatter in scatters:
            scatter.expect()
        inputs = torch.split_with_sizes(whole, [ranks * size for size in sizes])
        return _waiting([scatter.start(x_c) for scatter, x_c in zip(scatters, inputs, strict=True)])


def repeats(piece: float, pieces: float) -> tuple[int, int]:
    """Say how many matmuls of a piece are a third of the collective, and how many collectives that takes at least.

    piece, pieces: seconds of one matmul and of the whole collective in pieces.
    """
    matmuls = max(1, round(BESIDE * pieces / piece))
    return matmuls, min(MOST_AT_ONCE, max(1, ceil(matmuls * piece / BESIDE / pieces)))


def rates(matmuls: float, whole: float, beside: float, until: float) -> tuple[float, float]:
    """Return the shares of its own speed that each lane kept.

    matmuls, whole: seconds of the matmuls alone and of the collectives alone; beside, until: seconds the matmuls took
    beside the collectives, and both of them.
    """
    moved = whole - (until - beside)  # what of the collectives was done by the end of the matmuls, in their own seconds
    return min(1.0, max(LEAST_RATE, matmuls / beside)), min(1.0, max(LEAST_RATE, moved / beside))


def seconds(one: LayerOperator, parts: Parts, ranks: int, sizes: Sequence[int]) -> float:
    """Predict a pass cut into `sizes` from the times of its parts.

    A matmul of a chunk costs a fixed time and a time per row, a piece of a collective likewise; a lone or last one
    has its latency besides. While both lanes run, each has its rate.
    """
    first, whole, blocks = one.operator == ALL_GATHER, len(sizes) == 1, 1
    if one.operator != ALL_REDUCE:
        blocks = ranks - 1 if first else ranks
    fixed = max(parts.count * parts.matmul_piece - parts.matmul, 0.0) / max(parts.count - 1, 1)
    per_row = max(parts.matmul - fixed, 0.0) / one.m
    extra = max(parts.pieces - parts.collective, 0.0) / max(parts.count - 1, 1)
    moving = max(min(parts.pieces, parts.collective) - parts.latency, 0.0) / parts.rows
    compute, collective, own = [parts.matmul], [parts.collective], 0.0
    if not whole:
        compute = [blocks * (fixed + per_row * size) + 2 * LAUNCH for size in sizes]
        collective = [extra + moving * size for size in sizes]
        collective[0 if first else -1] += parts.latency
        own = fixed + per_row * parts.rows if first else 0.0
    call = ChunkedCall(
        compute=tuple(compute),
        collective=tuple(collective),
        communicate_first=first,
        own=own,
        before=(parts.gather if whole else parts.gather_pieces,),
        tail=parts.weight_gradient,
    )
    return makespan_beside(call, parts.compute_rate, parts.collective_rate)


def _even(rows: int, count: int) -> Sizes:
    return tuple(rows // count + (index < rows % count) for index in range(count))


def _waiting(works: Sequence[Any]) -> Callable[[], object]:
    return lambda: [work.wait() for work in works]
