"""What matmuls, collectives and streams of memory cost on a hardware, and one operator's call as durations.

Seconds and bytes. The formulas and what they leave out stand in docs/predict.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.rows import ROW_TILE
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall
from ascend_parallel.tuning.cost_model.hardware import Hardware, Steps

GATHER = "all_gather"
# No more of a rank's processor goes to moving data than this: its two threads share a core fairly.
MOST_PROCESSOR = 0.5


class CostModel:
    """Times on one hardware; remembers those of chunks it was asked for."""

    def __init__(self, hardware: Hardware) -> None:
        """Take the numbers of `hardware`."""
        self.hardware = hardware
        self._chunks: dict[tuple[Problem, bool], dict[int, tuple[float, float]]] = {}
        self._stretches = _stretches(hardware)

    def matmul(
        self, m: int, k: int, n: int, itemsize: int, *, batches: int = 1, utilisation: float | None = None
    ) -> float:
        """Return the time of `batches` products ``[m, k] x [k, n]`` in one launch.

        utilisation, if given, is that of a whole of which this is a part: the parts of a matmul keep
        the whole's, otherwise cutting would seem to speed it up.
        """
        unit, item = self.hardware.matmul, itemsize
        if utilisation is None:
            utilisation = self.utilisation(batches * m, k, n, item)
        width = self._block_width(n)
        across = batches * ceil(n / width)
        rows = min(ceil(across * ceil(m / high) / unit.cores) * high for high in _heights(m, unit.block_m))
        moved = item * (batches * m * k + k * n + batches * m * n)
        return unit.launch + max(rows * width * k / (self._rate(item) * utilisation), self.stream(moved))

    def utilisation(self, m: int, k: int, n: int, itemsize: int) -> float:
        """Return the share of the peak that ``[m, k] x [k, n]`` reaches, by the operands in use and by k."""
        unit = self.hardware.matmul
        rows = min(ceil(m / unit.block_m), unit.cores) * unit.block_m
        columns = min(ceil(n / unit.block_n), unit.cores) * unit.block_n
        footprint = (rows + columns) * k * itemsize
        share = next(share for limit, share in unit.utilisation if footprint <= limit)
        return share * (1.0 if k % unit.k_multiple == 0 else unit.k_unaligned)

    def stream(self, moved: float) -> float:
        """Return the time of reading or writing `moved` bytes of device memory."""
        return moved / (self.hardware.memory.bandwidth * self.hardware.memory.efficiency)

    def collective(self, kind: str, size: float, ranks: int, *, whole: bool = True) -> float:
        """Return the time of a collective whose whole tensor, over all ranks, has `size` bytes.

        kind is the operator it belongs to, or "all_gather" for one alone. whole=False: one of several pieces
        in flight. Beyond the ranks of one domain it goes through the network in between.
        """
        if ranks == 1 or size == 0:
            return 0.0
        domain = self.hardware.collectives.domain
        if ranks <= domain:
            return self._in_domain(kind, size, ranks, whole)
        groups = ceil(ranks / domain)
        return self._in_domain(kind, size, domain, whole) + self.network(kind, size / domain, groups)

    def network(self, kind: str, size: float, ranks: int) -> float:
        """Return the time of a ring over the network; `size` bytes are the whole tensor."""
        if ranks == 1 or size == 0:
            return 0.0
        steps = (2 if kind == ALL_REDUCE else 1) * (ranks - 1)
        return steps * (self.hardware.network.latency + size / ranks / self.hardware.network.bandwidth)

    def chunk(self, problem: Problem, rows: int, whole: bool) -> tuple[float, float]:
        """Return matmul and collective of one chunk of `rows` rows (as `Problem.rows` counts them), alone.

        whole: the only chunk, run as the serial path does, without blocks by rank.
        """
        return self._chunks_of(problem, [rows], whole)[0]

    def call(
        self, problem: Problem, sizes: Sequence[int], *, tail: float = 0.0, gathers_again: bool = False
    ) -> ChunkedCall:
        """Return a call cut into chunks of `sizes` rows.

        tail: seconds of the weight gradient after it. gathers_again: the column layer's backward, which
        gathers its input [m, n] in pieces of the same rows beforehand.
        """
        whole, first = len(sizes) == 1, problem.operator == ALL_GATHER
        compute, collective = zip(*self._chunks_of(problem, sizes, whole), strict=True)
        own = self._own(problem) if first and not whole else 0.0
        before: tuple[float, ...] = ()
        if gathers_again:
            row = problem.n * problem.dtype.itemsize * problem.ranks
            before = tuple(self.collective(GATHER, size * row, problem.ranks, whole=whole) for size in sizes)
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

    def bound(self, problem: Problem, *, tail: float = 0.0, gathers_again: bool = False) -> float:
        """Return what no cutting gets below: the longer of computation and communication, without any overhead."""
        item, ranks = problem.dtype.itemsize, problem.ranks
        matmul = self._unrounded(problem.m, problem.k, problem.n, item)
        moved = problem.m * (problem.k if problem.operator == ALL_GATHER else problem.n) * item
        collective = self.collective(problem.operator, moved, ranks, whole=False)
        if problem.operator == ALL_GATHER:
            return max(matmul, collective) + tail
        before = self.collective(GATHER, problem.m * problem.n * item, ranks, whole=False) if gathers_again else 0.0
        return max(matmul + tail, before + max(collective, tail))

    def _unrounded(self, m: int, k: int, n: int, itemsize: int) -> float:
        """Return the time of ``[m, k] x [k, n]`` with all cores filled evenly: no parts of it take less together."""
        width, rate = self._block_width(n), self._rate(itemsize) * self.utilisation(m, k, n, itemsize)
        computing = m * ceil(n / width) * width * k / (self.hardware.matmul.cores * rate)
        return max(computing, self.stream(itemsize * (m * k + k * n + m * n)))

    def _block_width(self, n: int) -> int:
        width = self.hardware.matmul.block_n
        return width if width == 1 else min(width, _tiled(n))

    def _rate(self, itemsize: int) -> float:
        """Multiply-adds a second of one core at its peak."""
        unit = self.hardware.matmul
        return unit.macs_per_cycle * unit.frequency * (unit.share_32_bit if itemsize >= 4 else 1.0)

    def _chunks_of(self, problem: Problem, sizes: Sequence[int], whole: bool) -> list[tuple[float, float]]:
        known = self._chunks.setdefault((problem, whole), {})
        for size in sizes:
            if size not in known:
                known[size] = self._chunk(problem, size, whole)
        return [known[size] for size in sizes]

    def _in_domain(self, kind: str, size: float, ranks: int, whole: bool) -> float:
        data, link = self.hardware.collectives, self.hardware.link
        steps, share = _steps(self.hardware, kind)
        factor = data.whole_gather if whole and kind in (GATHER, ALL_GATHER) else 1.0
        if link is not None:
            wire = size * _wire(self.hardware.topology, kind, ranks) * link.seconds_per_byte
            return share * _fit(steps, size) + factor * wire
        like = (
            size * _wire(self.hardware.topology, kind, ranks) / _wire(self.hardware.topology, kind, data.fitted_ranks)
        )
        return factor * share * _fit(steps, like)

    def _chunk(self, problem: Problem, rows: int, whole: bool) -> tuple[float, float]:
        m, k, n, item, ranks = problem.m, problem.k, problem.n, problem.dtype.itemsize, problem.ranks
        util = self.utilisation(m, k, n, item)
        width = k if problem.operator == ALL_GATHER else n
        if problem.operator == ALL_REDUCE:
            blocks, moved = 1, rows * width * item
        else:
            blocks, moved = ranks - (problem.operator == ALL_GATHER), rows * ranks * width * item
        collective = self.collective(problem.operator, moved, ranks, whole=whole)
        if whole:
            return self.matmul(m, k, n, item, utilisation=util) + self._inline(2), collective
        launches = self._launches(blocks)
        extra = (launches - 1) * self.hardware.matmul.launch
        matmul = self.matmul(rows, k, n, item, batches=blocks, utilisation=util) + extra
        return matmul + self._inline(launches + 1), collective

    def _own(self, problem: Problem) -> float:
        util = self.utilisation(problem.m, problem.k, problem.n, problem.dtype.itemsize)
        own = self.matmul(problem.rows, problem.k, problem.n, problem.dtype.itemsize, utilisation=util)
        return own + self._inline(1)

    def _launches(self, blocks: int) -> int:
        """Matmuls of `blocks` ranks' rows: one by one on a CPU; elsewhere in batches before and after the own rows."""
        return blocks if self.hardware.device == "cpu" else min(blocks, 2)

    def _inline(self, launches: int) -> float:
        return launches * self.hardware.host.launch if self.hardware.host.inline else 0.0

    def _contended(self, call: ChunkedCall) -> ChunkedCall:
        """Stretch what runs beside the other lane, for as long as that can last."""
        computing = sum(call.compute) + call.own + call.tail
        communicating = sum(call.collective) + sum(call.before)
        if not computing or not communicating:
            return call
        compute = 1 + (self._stretches[0] - 1) * min(1.0, communicating / computing)
        collective = 1 + (self._stretches[1] - 1) * min(1.0, computing / communicating)
        if call.communicate_first:
            return self._stretched(call, compute, collective) if len(call.compute) > 1 else call
        rest = compute if call.before else 1.0  # of the first matmul
        last = collective if call.tail else 1.0  # of the last collective
        return replace(
            call,
            compute=(call.compute[0] * rest, *(time * compute for time in call.compute[1:])),
            collective=(*(time * collective for time in call.collective[:-1]), call.collective[-1] * last),
            before=tuple(time * collective for time in call.before),
            tail=call.tail * compute,
        )

    @staticmethod
    def _stretched(call: ChunkedCall, compute: float, collective: float) -> ChunkedCall:
        """All collectives run beside the own rows' matmul, all matmuls but the last chunk's beside a collective."""
        return replace(
            call,
            compute=(*(time * compute for time in call.compute[:-1]), call.compute[-1]),
            collective=tuple(time * collective for time in call.collective),
            own=call.own * compute,
        )


def _stretches(hardware: Hardware) -> tuple[float, float]:
    """Factors of a matmul beside a collective and of a collective beside a matmul."""
    compute = hardware.contention.compute
    if hardware.link is not None:
        compute /= 1 - min(MOST_PROCESSOR, hardware.link.processor / hardware.link.seconds_per_byte)
    return compute, hardware.contention.collective


def _steps(hardware: Hardware, kind: str) -> tuple[Steps, float]:
    """Steps of a collective's time and the factor on them."""
    data = hardware.collectives
    if kind == ALL_REDUCE:
        return data.all_reduce, 1.0
    own = data.reduce_scatter if kind == REDUCE_SCATTER else data.all_gather
    return (own, 1.0) if own else (data.all_reduce, data.gather_share)


def _wire(topology: str, kind: str, ranks: int) -> float:
    """Share of the whole tensor that goes over one link: of a ring, or each of the links of a mesh."""
    rounds = 2 if kind == ALL_REDUCE else 1
    return rounds / ranks * (1 if topology == "mesh" else ranks - 1)


def _fit(steps: Steps, size: float) -> float:
    """Evaluate the step that `size` falls into, and never less than the smallest size costs."""
    floor = steps[0][1]
    for limit, fixed, per_byte, per_square in steps:
        if size <= limit:
            return max(floor, fixed + per_byte * size + per_square * size * size)
    raise AssertionError("the last step has no limit")


def _heights(m: int, block: int) -> Sequence[int]:
    """Heights a kernel may give its blocks of rows: a full one to a half, in tiles of 16, or what few rows need."""
    half = block // 2
    return [min(block, _tiled(m))] if block > 1 and m <= half else range(max(1, half), block + 1, ROW_TILE)


def _tiled(size: int) -> int:
    """Return `size` in whole tiles of 16."""
    return ROW_TILE * ceil(size / ROW_TILE)
