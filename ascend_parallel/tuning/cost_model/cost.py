"""Compute the times of matmuls, collectives and memory streams on a hardware, and the durations of a chunked call.

Units: seconds and bytes. docs/predict.md has the formulas and their limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import numpy.typing as npt

from ascend_parallel.ops import call as operators
from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.rows import ROW_TILE
from ascend_parallel.process_groups.backend import usual_backend
from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall
from ascend_parallel.tuning.cost_model.hardware import Hardware, Steps

# How often a tensor goes around a ring.
ROUNDS = {ALL_REDUCE: 2, REDUCE_SCATTER: 1, ALL_GATHER: 1}
# The collective of an operator.
COLLECTIVES = {
    operators.ALL_REDUCE: ALL_REDUCE,
    operators.REDUCE_SCATTER: REDUCE_SCATTER,
    operators.ALL_GATHER: ALL_GATHER,
}
# Multiply-adds of a fused attention kernel's backward / forward: five products / two products.
ATTENTION_BACKWARD = 2.5
# A memory-bound operator's backward reads and writes about twice what its forward does.
ELEMENTWISE_BACKWARD = 2
# Largest share of a rank's processor that moves data: the scheduler shares a core fairly between two threads.
MOST_PROCESSOR = 0.5


class CostModel:
    """Times on one hardware; caches the times of chunks."""

    def __init__(self, hardware: Hardware) -> None:
        """Take the numbers of `hardware`."""
        self.hardware = hardware
        self._chunks: dict[tuple[Matmul, bool], dict[int, tuple[float, float]]] = {}
        self._products: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self._stretches = _stretches(hardware)

    def matmul(
        self, m: int, k: int, n: int, itemsize: int, *, batches: int = 1, utilisation: float | None = None
    ) -> float:
        """Return the time of `batches` products ``[m, k] x [k, n]`` in one launch.

        utilisation: the utilisation of the whole matmul, for a part of it. A part keeps the utilisation of the whole;
        otherwise splitting would seem to speed the matmul up.
        """
        unit, item = self.hardware.matmul, itemsize
        if utilisation is None:
            utilisation = self.utilisation(batches * m, k, n, item)
        width = self._block_width(n)
        across = batches * ceil(n / width)
        rows = min(ceil(across * ceil(m / high) / unit.cores) * high for high in _heights(m, unit.block_m))
        moved = item * (batches * m * k + k * n + batches * m * n)
        return unit.launch + max(rows * width * k / (self.rate(item) * utilisation), self.stream(moved))

    def products(self, m: int, k: int, n: int, itemsize: int) -> tuple[float, float]:
        """Return the time of ``[m, k] x [k, n]``, and of the gradients of both operands."""
        key = m, k, n, itemsize
        if key not in self._products:
            backward = self.matmul(m, n, k, itemsize) + self.matmul(n, m, k, itemsize)
            self._products[key] = self.matmul(m, k, n, itemsize), backward
        return self._products[key]

    def attention(self, pairs: float, key_width: int, value_width: int, itemsize: int) -> float:
        """Return the time of a fused attention's forward, which writes no scores.

        pairs: of a query with a key, of all heads; a causal kernel computes half of them.
        """
        unit, kernel = self.hardware.matmul, self.hardware.attention
        macs = pairs * (max(key_width, kernel.least_head) + max(value_width, kernel.least_head))
        return unit.launch + macs / (self.rate(itemsize) * unit.cores * kernel.utilisation)

    def elementwise(self, moved: float) -> float:
        """Return the time of an operator that is bound by the `moved` bytes of device memory."""
        return self.stream(moved) + self.hardware.matmul.launch

    def utilisation(self, m: int, k: int, n: int, itemsize: int) -> float:
        """Return the share of the peak that ``[m, k] x [k, n]`` reaches, from the operand bytes in use and from k."""
        unit = self.hardware.matmul
        rows = min(ceil(m / unit.block_m), unit.cores) * unit.block_m
        columns = min(ceil(n / unit.block_n), unit.cores) * unit.block_n
        footprint = (rows + columns) * k * itemsize
        share = next(share for limit, share in unit.utilisation if footprint <= limit)
        return share * (1.0 if k % unit.k_multiple == 0 else unit.k_unaligned)

    def rate(self, itemsize: int) -> float:
        """Return the peak multiply-adds per second of one core."""
        unit = self.hardware.matmul
        return unit.macs_per_cycle * unit.frequency * (unit.share_32_bit if itemsize >= 4 else 1.0)

    def peak(self, itemsize: int) -> float:
        """Return the peak multiply-adds per second of a card."""
        return self.rate(itemsize) * self.hardware.matmul.cores

    def stream(self, moved: float) -> float:
        """Return the time of reading or writing `moved` bytes of device memory."""
        return moved / (self.hardware.memory.bandwidth * self.hardware.memory.efficiency)

    def collective(self, kind: str, size: float, ranks: int, *, whole: bool = True) -> float:
        """Return the time of a collective; `size` is the bytes of the whole tensor over all ranks.

        kind: "all_reduce", "all_gather" or "reduce_scatter". whole=False: the collective is one of several pieces in
        flight. Ranks beyond one domain add the time of the network.
        """
        if ranks == 1 or size == 0:
            return 0.0
        domain = self.hardware.collectives.domain
        if ranks <= domain:
            return self._in_domain(kind, size, ranks, whole)
        groups = ceil(ranks / domain)
        return self.collective(kind, size, domain, whole=whole) + self.network(kind, size / domain, groups)

    def network(self, kind: str, size: float, ranks: int) -> float:
        """Return the time of collective `kind` as a ring over the network; `size` is the bytes of the global tensor."""
        if ranks == 1 or size == 0:
            return 0.0
        steps = ROUNDS[kind] * (ranks - 1)
        return steps * (self.hardware.network.latency + size / ranks / self.hardware.network.bandwidth)

    def line(self, kind: str, size: float, ranks: int, in_domain: int) -> float:
        """Return the time of a collective over a line of ranks, of which each `in_domain` share a domain."""
        inside = self.collective(kind, size, in_domain)
        return inside + self.network(kind, size / in_domain, ranks // in_domain)

    def all_to_all(self, size: float, ranks: int, in_domain: int) -> float:
        """Return the time of an all-to-all over a line of ranks, of which each `in_domain` share a domain.

        Each rank has `size` bytes, as many for each rank of the line. An all-gather that sends as many bytes stands for
        the part inside the domain and for the part over the network; they follow each other.
        """
        inside = self.collective(ALL_GATHER, size * in_domain / ranks, in_domain)
        return inside + self.network(ALL_GATHER, size, ranks // in_domain)

    def send(self, size: float, *, inside: bool) -> float:
        """Return the time of `size` bytes from a rank to another one, inside a domain or over the network."""
        if size == 0:
            return 0.0
        # In an all-gather of 2 ranks each rank sends half of the bytes.
        return self.collective(ALL_GATHER, 2 * size, 2) if inside else self.network(ALL_GATHER, 2 * size, 2)

    def chunk(self, problem: Matmul, rows: int, whole: bool) -> tuple[float, float]:
        """Return the times of matmul and collective of one chunk of `rows` rows (counted as in `Matmul.rows`).

        whole: this is the only chunk, run as on the serial path, without blocks by rank.
        """
        return self._chunks_of(problem, [rows], whole)[0]

    def call(
        self, problem: Matmul, sizes: Sequence[int], *, tail: float = 0.0, gathers_input: bool = False
    ) -> ChunkedCall:
        """Return the durations of a call in chunks of `sizes` rows.

        tail: seconds of the weight gradient after the call. gathers_input: add the all-gather of the layer's input
        [m, n] before the call, in pieces of the same rows, as in the column layer's backward.
        """
        whole, first = len(sizes) == 1, problem.operator == operators.ALL_GATHER
        compute, collective = zip(*self._chunks_of(problem, sizes, whole), strict=True)
        own = self._own(problem) if first and not whole else 0.0
        before: tuple[float, ...] = ()
        if gathers_input:
            row = problem.n * problem.dtype.itemsize * problem.ranks
            before = tuple(self.collective(ALL_GATHER, size * row, problem.ranks, whole=whole) for size in sizes)
        host = self.hardware.host
        call = ChunkedCall(
            compute=compute,
            collective=collective,
            communicate_first=first,
            own=own,
            before=before,
            tail=tail,
            issue=0.0 if host.inline else host.launch,
        )
        return self._contended(call)

    def bound(self, problem: Matmul, *, tail: float = 0.0, gathers_input: bool = False) -> float:
        """Return the lower bound for all sizes: the longer of computation and communication, without overheads."""
        item, ranks = problem.dtype.itemsize, problem.ranks
        matmul = self._unrounded(problem.m, problem.k, problem.n, item)
        moved = problem.m * (problem.k if problem.operator == operators.ALL_GATHER else problem.n) * item
        collective = self.collective(COLLECTIVES[problem.operator], moved, ranks, whole=False)
        if problem.operator == operators.ALL_GATHER:
            return max(matmul, collective) + tail
        before = self.collective(ALL_GATHER, problem.m * problem.n * item, ranks, whole=False) if gathers_input else 0.0
        return max(matmul + tail, before + max(collective, tail))

    def launches(self, blocks: int) -> int:
        """Return the launches for the rows of `blocks` ranks: one per rank, or at most two batches on a device."""
        return min(blocks, 2) if usual_backend(self.hardware.device).launches else blocks

    def stretches(self, computing: float, communicating: float) -> tuple[float, float]:
        """Return the factors on computation and communication of these seconds while each runs beside the other."""
        if not computing or not communicating:
            return 1.0, 1.0
        compute, collective = self._stretches
        return (
            1 + (compute - 1) * min(1.0, communicating / computing),
            1 + (collective - 1) * min(1.0, computing / communicating),
        )

    def _unrounded(self, m: int, k: int, n: int, itemsize: int) -> float:
        """Return the time of ``[m, k] x [k, n]`` with all cores evenly filled: its chunks never take less in sum."""
        width, rate = self._block_width(n), self.rate(itemsize) * self.utilisation(m, k, n, itemsize)
        computing = m * ceil(n / width) * width * k / (self.hardware.matmul.cores * rate)
        return max(computing, self.stream(itemsize * (m * k + k * n + m * n)))

    def _block_width(self, n: int) -> int:
        width = self.hardware.matmul.block_n
        return width if width == 1 else min(width, _tiled(n))

    def _chunks_of(self, problem: Matmul, sizes: Sequence[int], whole: bool) -> list[tuple[float, float]]:
        known = self._chunks.setdefault((problem, whole), {})
        for size in sizes:
            if size not in known:
                known[size] = self._chunk(problem, size, whole)
        return [known[size] for size in sizes]

    def _in_domain(self, kind: str, size: float, ranks: int, whole: bool) -> float:
        data, link = self.hardware.collectives, self.hardware.link
        steps, share = _steps(self.hardware, kind)
        factor = data.whole_gather if whole and kind == ALL_GATHER else 1.0
        if link is not None:
            wire = size * _wire(self.hardware.topology, kind, ranks) * link.seconds_per_byte
            return share * _fit(steps, size) + factor * wire
        like = (
            size * _wire(self.hardware.topology, kind, ranks) / _wire(self.hardware.topology, kind, data.fitted_ranks)
        )
        return factor * share * _fit(steps, like)

    def _chunk(self, problem: Matmul, rows: int, whole: bool) -> tuple[float, float]:
        m, k, n, item, ranks = problem.m, problem.k, problem.n, problem.dtype.itemsize, problem.ranks
        util = self.utilisation(m, k, n, item)
        width = k if problem.operator == operators.ALL_GATHER else n
        if problem.operator == operators.ALL_REDUCE:
            blocks, moved = 1, rows * width * item
        else:
            blocks, moved = ranks - (problem.operator == operators.ALL_GATHER), rows * ranks * width * item
        collective = self.collective(COLLECTIVES[problem.operator], moved, ranks, whole=whole)
        if whole:
            return self.matmul(m, k, n, item, utilisation=util) + self._inline(2), collective
        launches = self.launches(blocks)
        extra = (launches - 1) * self.hardware.matmul.launch
        matmul = self.matmul(rows, k, n, item, batches=blocks, utilisation=util) + extra
        return matmul + self._inline(launches + 1), collective

    def _own(self, problem: Matmul) -> float:
        util = self.utilisation(problem.m, problem.k, problem.n, problem.dtype.itemsize)
        own = self.matmul(problem.rows, problem.k, problem.n, problem.dtype.itemsize, utilisation=util)
        return own + self._inline(1)

    def _inline(self, launches: int) -> float:
        return launches * self.hardware.host.launch if self.hardware.host.inline else 0.0

    def _contended(self, call: ChunkedCall) -> ChunkedCall:
        """Return the call with each lane slowed down for as long as the other lane can run beside it."""
        computing = sum(call.compute) + call.own + call.tail
        communicating = sum(call.collective) + sum(call.before)
        if not computing or not communicating:
            return call
        compute, collective = self.stretches(computing, communicating)
        if call.communicate_first:
            return self._stretched(call, compute, collective) if len(call.compute) > 1 else call
        first = compute if call.before else 1.0  # the first matmul runs beside `before` only
        last = collective if call.tail else 1.0  # the last collective runs beside `tail` only
        return replace(
            call,
            compute=(call.compute[0] * first, *(time * compute for time in call.compute[1:])),
            collective=(*(time * collective for time in call.collective[:-1]), call.collective[-1] * last),
            before=tuple(time * collective for time in call.before),
            tail=call.tail * compute,
        )

    @staticmethod
    def _stretched(call: ChunkedCall, compute: float, collective: float) -> ChunkedCall:
        """Slow down all collectives, which run beside the own rows' matmul, and all matmuls but the last chunk's."""
        return replace(
            call,
            compute=(*(time * compute for time in call.compute[:-1]), call.compute[-1]),
            collective=tuple(time * collective for time in call.collective),
            own=call.own * compute,
        )


def ranks_in_domain(lines: npt.NDArray[np.int64], domain: int) -> int:
    """Return the number of ranks of a line (``[lines, ranks]``) in one domain; 1 if a line is not divided evenly.

    Global ranks fill domains in order; the line with the most domains counts.
    """
    ranks = lines.shape[1]
    domains = int((np.diff(np.sort(lines // domain, axis=1), axis=1) > 0).sum(axis=1).max()) + 1
    return ranks // domains if ranks % domains == 0 else 1


def _stretches(hardware: Hardware) -> tuple[float, float]:
    """Return the slowdown of a matmul beside a collective, and of a collective beside a matmul."""
    compute = hardware.contention.compute
    if hardware.link is not None:
        compute /= 1 - min(MOST_PROCESSOR, hardware.link.processor / hardware.link.seconds_per_byte)
    return compute, hardware.contention.collective


def _steps(hardware: Hardware, kind: str) -> tuple[Steps, float]:
    """Return the steps of a collective's time and the factor on them."""
    data = hardware.collectives
    if kind == ALL_REDUCE:
        return data.all_reduce, 1.0
    own = {REDUCE_SCATTER: data.reduce_scatter, ALL_GATHER: data.all_gather}[kind]
    return (own, 1.0) if own else (data.all_reduce, data.gather_share)


def _wire(topology: str, kind: str, ranks: int) -> float:
    """Return the share of the whole tensor that goes over each link of a ring or a mesh."""
    return ROUNDS[kind] / ranks * (1 if topology == "mesh" else ranks - 1)


def _fit(steps: Steps, size: float) -> float:
    """Return the time of `size` bytes from the step that contains `size`; at least the time of the first step."""
    floor = steps[0][1]
    for limit, fixed, per_byte, per_square in steps:
        if size <= limit:
            return max(floor, fixed + per_byte * size + per_square * size * size)
    raise AssertionError("the last step has no limit")


def _heights(m: int, block: int) -> Sequence[int]:
    """Return the row-block heights that a kernel may choose: half a block to a block; less for few rows."""
    half = block // 2
    return [min(block, _tiled(m))] if block > 1 and m <= half else range(max(1, half), block + 1, ROW_TILE)


def _tiled(size: int) -> int:
    """Return `size` in whole tiles of 16."""
    return ROW_TILE * ceil(size / ROW_TILE)
