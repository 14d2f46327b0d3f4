"""How a region's MLP communicates, chunk by chunk: with all-reduces, or with sequence parallelism.

Rows have the shape [r, m, N]. With all-reduces r is 1, and m is all rows. With sequence parallelism r is the number of
ranks, and m is one rank's rows: chunk i holds the i-th slice of every rank's rows, in all matmuls of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ascend_parallel.ops.collectives import reduce_scatters
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.multiply import multiply, multiply_blocks, rank_blocks
from ascend_parallel.ops.operators import recorded
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.record import MATMUL, RECORDING, compute
from ascend_parallel.ops.registry import choose
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.region.cuts import RegionCut
from ascend_parallel.overlap.region.rows import LazyRows

# A chunk is sent before the chunk this many places earlier is multiplied. More would wait for rows too early.
AHEAD = 1


def chunk_bounds(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the first row of each chunk, and the first row behind it."""
    return list(pairwise(accumulate(sizes, initial=0)))


def multiply_rows(x_r: torch.Tensor, w: torch.Tensor, y_r: torch.Tensor) -> None:
    """Write ``x_r @ w`` to y_r: x_r [r, m, K], w [K, N], y_r [r, m, N]; a matmul for each block of rows."""
    if x_r.shape[0] == 1:
        multiply_blocks([x_r[0]], w, [y_r[0]])
    else:
        multiply_blocks(rank_blocks(x_r), w, rank_blocks(y_r))


class Rows:
    """The input of a pass, all of whose rows this rank has."""

    def __init__(self, x_m: torch.Tensor, sizes: Sizes, source: LazyRows | None) -> None:
        """Hold x_m [m, K]; `source` finishes its rows, None: they are finished."""
        self.x_r = x_m[None]
        self._bounds, self._source = chunk_bounds(sizes), source

    def multiply(self, index: int, w: torch.Tensor, y_r: torch.Tensor, label: str) -> None:
        """Write the product of a chunk's rows, once they are finished, to y_r: w [K, N], y_r [1, m_c, N]."""
        start, stop = self._bounds[index]
        if self._source is not None:
            self._source.up_to(stop)
        compute(MATMUL, label, multiply_rows, self.x_r[:, start:stop], w, y_r)

    def wait(self) -> torch.Tensor:
        """Return all rows [m, K]."""
        return self.x_r[0]


class GatheredRows:
    """The input of a pass, gathered from all ranks chunk by chunk: ``x_r = all_gather(x_m)`` [R, m, K]."""

    def __init__(
        self, x_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, source: LazyRows | None, ahead: int = AHEAD
    ) -> None:
        """Send nothing yet; chunk i is sent when chunk ``i - ahead`` is asked for."""
        self.x_r = x_m.new_empty(group.size(), *x_m.shape)
        self.pending = Pending(self.x_r.flatten(0, 1), ALL_GATHER, group, len(sizes))
        self._x_m, self._bounds, self._group = x_m, chunk_bounds(sizes), group
        self._source, self._ahead, self._sent = source, ahead, 0
        COUNTS.add(ALL_GATHER, len(sizes), len(sizes))

    def send(self, count: int) -> None:
        """Start the gathers of the first `count` chunks."""
        for start, stop in self._bounds[self._sent : count]:
            if self._source is not None:
                self._source.up_to(stop)
            places = [x_m[start:stop] for x_m in self.x_r.unbind()]
            x_c = self._x_m[start:stop].contiguous()
            self.pending.launch(dist.all_gather, places, x_c, group=self._group, async_op=True)
            self._sent += 1

    def multiply(self, index: int, w: torch.Tensor, y_r: torch.Tensor, label: str) -> None:
        """Write the product of a chunk's gathered rows to y_r: w [K, N], y_r [R, m_c, N].

        The rank's own rows need no gather. They are multiplied first, under the gather of the others.
        """
        self.send(index + 1)
        start, stop = self._bounds[index]
        own = self._group.rank()
        compute(MATMUL, label, multiply, self._x_m[start:stop], w, y_r[own])
        self.send(index + 1 + self._ahead)
        self.pending.wait_for(index)
        others = rank_blocks(self.x_r[:, start:stop], but=own)
        compute(MATMUL, label, multiply_blocks, others, w, rank_blocks(y_r, but=own))

    def wait(self) -> torch.Tensor:
        """Return all gathered rows [R m, K], in rank order."""
        self.send(len(self._bounds))
        return self.pending.wait()


class Reduced:
    """The result of a pass, y_m [m, N], summed over all ranks chunk by chunk; m as in `Rows` or `GatheredRows`."""

    def __init__(self, y_m: torch.Tensor, sizes: Sizes, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        """Post the receives, if the backend needs that."""
        operator = REDUCE_SCATTER if sequence_parallel else ALL_REDUCE
        self.pending = Pending(y_m, operator, group, len(sizes))
        self._y_m, self._bounds, self._group = y_m, chunk_bounds(sizes), group
        self._starts: Sequence[Callable[[torch.Tensor], object]] | None = None
        if sequence_parallel:
            self._starts = self.pending.expect(reduce_scatters, y_m, sizes, group)
        COUNTS.add(operator, len(sizes), len(sizes))

    def multiply(self, index: int, x_r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a chunk of the result, ``x_r @ w`` [r, m_c, N]: x_r [r, m_c, K], w [K, N]."""
        start, stop = self._bounds[index]
        if self._starts is None:
            y_r = self._y_m[None, start:stop]
        else:
            y_r = self._y_m.new_empty(x_r.shape[0], stop - start, w.shape[1])
        multiply_rows(x_r, w, y_r)
        return y_r

    def send(self, index: int, y_r: torch.Tensor) -> None:
        """Start the collective of a chunk."""
        if self._starts is None:
            self.pending.launch(dist.all_reduce, y_r[0], group=self._group, async_op=True)
        else:
            self.pending.launch(self._starts[index], y_r.flatten(0, 1))  # type: ignore[arg-type]


@contextmanager
def recorded_call(
    group: dist.ProcessGroup, cut: RegionCut, w: torch.Tensor | None, sequence_parallel: bool
) -> Iterator[None]:
    """Record the operator of a pass that sums over ranks, if a recorder is active; w [K, N] is its right operand."""
    recorder = RECORDING.recorder
    if recorder is None or w is None:
        yield
        return
    ranks, rows = group.size(), sum(cut.sizes)
    operator = REDUCE_SCATTER if sequence_parallel else ALL_REDUCE
    m = rows * ranks if sequence_parallel else rows
    problem = Problem(operator, m, w.shape[0], w.shape[1], w.dtype, w.device.type, ranks)
    with recorder.call(recorded(choose(problem, cut.settings)), problem.device, group, fused=False):
        yield


@contextmanager
def draining(*pending: Pending) -> Iterator[None]:
    """Guard a loop that starts collectives: if it fails, wait for those that have started."""
    if not pending:
        yield
        return
    with pending[0].launching(), draining(*pending[1:]):
        yield
