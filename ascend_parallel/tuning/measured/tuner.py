"""The sizes of a layer's pass: measured, or predicted from a few measurements and confirmed by the clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import torch

from ascend_parallel.ops.call import ALL_GATHER, Matmul
from ascend_parallel.ops.device_units import fills
from ascend_parallel.ops.registry import cuts_to_time, row_step
from ascend_parallel.ops.rows import Sizes, is_one_gather, one_gather
from ascend_parallel.ops.settings import StreamLimit
from ascend_parallel.overlap.layer_shape import COLUMN, LayerOperator
from ascend_parallel.tuning.cost_model.chunk_search import ChunkSearchResult, best_sizes
from ascend_parallel.tuning.measured.contest import LEAST_GAIN, Contest, fastest
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown, seconds
from ascend_parallel.tuning.measured.pass_times import TimedLinear, Times

log = logging.getLogger("ascend_parallel")

COUNTS = (2, 4, 8)  # chunk counts that are always timed
ROUNDS = 7  # timings of every candidate
FIRST_ROUNDS = 3  # of a prediction's confirmation; if each of them agrees, the other rounds are left out
MOST_CHUNKS = 16
MOST_UNLIKE = 8  # a pass with so many times the operations or bytes is measured anew
FEW = 4  # the model also searches with at most this many chunks, because its cost per chunk is a rough estimate


@dataclass(frozen=True)
class TunedPass:
    """What was measured of one pass.

    sizes
        The rows of each chunk.
    serial, chosen
        The median seconds with one chunk, and with `sizes`.
    why
        If `sizes` is one chunk: the reason.
    """

    sizes: Sizes
    serial: float
    chosen: float
    why: str = ""

    def __str__(self) -> str:
        """Return the result in words, for the log."""
        if len(self.sizes) == 1:
            return f"kept whole (one chunk of {self.sizes[0]} rows), because {self.why}; {1e3 * self.serial:.3f} ms"
        if is_one_gather(self.sizes):
            whole = f"waited for first: {1e3 * self.serial:.3f} ms"
            return f"one gather under the product of a rank's own rows, {1e3 * self.chosen:.3f} ms ({whole})"
        rows = str(self.sizes[0]) if len(set(self.sizes)) == 1 else ", ".join(map(str, self.sizes))
        times = f"{1e3 * self.chosen:.3f} ms (whole {1e3 * self.serial:.3f} ms)"
        return f"{len(self.sizes)} chunks of {rows} rows, {times}"


def measured(layer: TimedLinear, operator: LayerOperator, breakdown: PassBreakdown) -> TunedPass:
    """Time the counts of COUNTS and the sizes that the model predicts from `breakdown`; return the fastest."""
    whole = (breakdown.rows,)
    candidates = cuts_to_time(operator.matmul, COUNTS)
    for most in (MOST_CHUNKS, FEW):
        model = best_of_model(operator.matmul, breakdown, most)
        candidates += [model.sizes, model.equal]
    tried = tuple(dict.fromkeys([whole, *(layer.sizes_as_run(operator, sizes) for sizes in dict.fromkeys(candidates))]))
    times = layer.time_sizes(operator, tried, ROUNDS)
    if len(tried) == 1:
        return TunedPass(whole, median(times[whole]), median(times[whole]), "it cannot be cut")
    best = min(tried, key=lambda sizes: (median(times[sizes]), len(sizes)))
    # Time the two again, alone: among many candidates, a lucky median may be the smallest.
    if best != whole:
        times = layer.time_sizes(operator, (whole, best), ROUNDS)
    return decide(times, whole, best)


def decide(times: Times, whole: Sizes, best: Sizes) -> TunedPass:
    """Return `best` if it beats one chunk; otherwise one chunk, with the reason."""
    serial, contest = median(times[whole]), Contest(times[whole], times[best])
    if best != whole and contest.won:
        return TunedPass(best, serial, median(times[best]))
    lost = f"{contest.lost} of {len(times[best])} rounds"
    return TunedPass(whole, serial, serial, _why_whole(best, whole, contest.gain, lost))


def limit_of_stream(
    layer: TimedLinear, operator: LayerOperator, sizes: Sizes, limits: Sequence[StreamLimit]
) -> tuple[StreamLimit | None, float]:
    """Time a pass in `sizes` without a limit of its stream's cores and with each; return the winner and its gain."""
    times = layer.time_limits(operator, sizes, (None, *limits), ROUNDS)
    best = fastest(times, limits)
    contest = Contest(times[None], times[best])
    return (best, contest.gain) if contest.won else (None, 0.0)


def _why_whole(best: Sizes, whole: Sizes, gain: float, lost: str) -> str:
    if best == whole:
        return "no cut that was timed is faster"
    wins = f"wins {100 * gain:.1f} % and loses {lost}, which may be noise"
    return f"the best cut, {len(best)} chunks, " + (wins if gain > 0 else f"takes {-100 * gain:.1f} % longer")


class MeasuredBreakdowns:
    """The breakdowns of passes on one group: of similar passes one is measured, the others follow from their sizes."""

    def __init__(self) -> None:
        """Know no pass yet."""
        self._known: dict[tuple[str, str, bool, torch.dtype], list[tuple[Matmul, PassBreakdown]]] = {}

    def of(self, layer: TimedLinear, operator: LayerOperator) -> PassBreakdown:
        """Return the breakdown of a pass. Every rank of the group knows the same, so all measure, or none."""
        alike = operator.matmul.operator, operator.direction, layer.shape.kind == COLUMN, layer.shape.dtype
        known = self._known.setdefault(alike, [])
        for other, breakdown in known:
            if (estimate := scaled(breakdown, other, operator.matmul)) is not None:
                return estimate
        breakdown = layer.breakdown(operator, FIRST_ROUNDS)
        known.append((operator.matmul, breakdown))
        return breakdown


def scaled(breakdown: PassBreakdown, measured: Matmul, wanted: Matmul) -> PassBreakdown | None:
    """Return the breakdown of a pass from that of a similar one, by operations and bytes; None if too different.

    A matmul takes a time per operation, and a collective one per byte beside its latency.
    """
    operations = wanted.m * wanted.k * wanted.n / (measured.m * measured.k * measured.n)
    columns = "k" if wanted.operator == ALL_GATHER else "n"
    moved = wanted.m * getattr(wanted, columns) / (measured.m * getattr(measured, columns))
    if wanted.m != measured.m or not all(1 / MOST_UNLIKE <= ratio <= MOST_UNLIKE for ratio in (operations, moved)):
        return None
    computed = {name: operations * getattr(breakdown, name) for name in ("matmul", "matmul_piece", "weight_gradient")}
    sent = {
        name: breakdown.latency + moved * max(0.0, getattr(breakdown, name) - breakdown.latency)
        if getattr(breakdown, name)
        else 0.0
        for name in ("collective", "pieces", "gather", "gather_pieces")
    }
    changes: dict[str, Any] = computed | sent
    return replace(breakdown, **changes)


def confirmed(layer: TimedLinear, operator: LayerOperator, breakdown: PassBreakdown) -> TunedPass:
    """Time the sizes that the model predicts beside one chunk: a wrong prediction must not make a run slower.

    Where the model expects nothing, nothing is timed. Where the first rounds are clear, no further ones follow.
    """
    whole, expected = (breakdown.rows,), predicted(operator.matmul, breakdown)
    best = layer.sizes_as_run(operator, expected.sizes)
    if best == whole:
        uncuttable = "it cannot be cut as a model would"
        why = uncuttable if expected.sizes != whole else "a model of its parts expects no cut to win"
        return TunedPass(whole, expected.serial, expected.serial, why)
    times = layer.time_sizes(operator, (whole, best), FIRST_ROUNDS)
    if not Contest(times[whole], times[best]).is_clear:
        more = layer.time_sizes(operator, (whole, best), ROUNDS - FIRST_ROUNDS)
        times = {sizes: [*times[sizes], *more[sizes]] for sizes in times}
    return decide(times, whole, best)


def predicted(matmul: Matmul, breakdown: PassBreakdown) -> TunedPass:
    """Return the sizes that the model predicts from the breakdown alone."""
    best = best_of_model(matmul, breakdown)
    if best.seconds > best.one_chunk * (1 - LEAST_GAIN):
        return TunedPass((breakdown.rows,), best.one_chunk, best.one_chunk)
    return TunedPass(best.sizes, best.one_chunk, best.seconds)


def best_of_model(matmul: Matmul, breakdown: PassBreakdown, most_chunks: int = MOST_CHUNKS) -> ChunkSearchResult:
    """Search the sizes of least predicted time, with at most `most_chunks` chunks that fill the device."""

    def cost(sizes: Sizes) -> float:
        return seconds(matmul, breakdown, sizes) if fills(matmul, sizes) else inf

    best = best_sizes(breakdown.rows, cost, most_chunks=most_chunks, tile=row_step(matmul))
    uncut = one_gather(breakdown.rows)
    if uncut in cuts_to_time(matmul, ()) and cost(uncut) < best.seconds:
        return replace(best, sizes=uncut, seconds=cost(uncut))
    return best
