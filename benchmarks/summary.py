"""Turn the times of all rounds into medians and into the hidden share of what can be hidden.

    E_bound = (T_seq - T_ovl) / (T_seq - max(T_matmul, T_comm))

1 means that the shorter of matmul and communication is hidden completely, 0 that nothing is. T_comm is the time of the
pass's collectives alone, each in one call, as the serial path runs them.

E_tight uses a bound that no run can get below. Backward cannot begin before forward ends, so the bounds of the two
passes are added. Communication counts in pieces if that is faster than in one call (gloo moves a large message in one
direction at a time).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

RESAMPLES = 1000
LEAST_ROUNDS = 5  # for an interval to mean anything
# No quotient is given if less than this share of the serial time can be hidden: noise would dominate.
LEAST_SHARE = 0.03

Times = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A chunk count of a pass: median seconds, E with its 95% interval, and Megatron's time / the package's time."""

    chunks: int
    seconds: float
    e_bound: float | None
    e_bound_low: float | None
    e_bound_high: float | None
    e_tight: float | None
    megatron_over_ours: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One pass of one layer and shape, medians in seconds."""

    rounds: int
    matmul: float
    comm: float
    comm_in_pieces: float
    serial: float
    megatron: float
    bound: float
    bound_tight: float
    overlaps: list[Overlap]


def summarize(times: Times, forward: Times | None, chunks: list[int]) -> Summary:
    """Summarize one pass; `forward` gives the times of the forward part alone if the pass has a backward part."""
    rounds = len(times["serial"])
    middle = {name: median(values) for name, values in times.items()}

    def efficiency(count: int, floor: Callable[[list[int]], float]) -> Callable[[list[int]], float | None]:
        ours = times[f"overlapped {count}"]

        def of(picked: list[int]) -> float | None:
            serial, overlapped = _median(times["serial"], picked), _median(ours, picked)
            to_hide = serial - floor(picked)
            return (serial - overlapped) / to_hide if to_hide > LEAST_SHARE * serial else None

        return of

    def bound(picked: list[int]) -> float:
        return max(_median(times["matmul"], picked), _median(times["comm"], picked))

    def bound_tight(picked: list[int]) -> float:
        return _tight_floor(times, forward, picked)

    everything = list(range(rounds))
    overlaps = []
    for count in chunks:
        e_bound = efficiency(count, bound)
        low, high = _interval(e_bound, rounds)
        ours = middle[f"overlapped {count}"]
        overlaps.append(
            Overlap(
                chunks=count,
                seconds=ours,
                e_bound=e_bound(everything),
                e_bound_low=low,
                e_bound_high=high,
                e_tight=efficiency(count, bound_tight)(everything),
                megatron_over_ours=middle["megatron"] / ours,
            )
        )
    return Summary(
        rounds=rounds,
        matmul=middle["matmul"],
        comm=middle["comm"],
        comm_in_pieces=middle["comm in pieces"],
        serial=middle["serial"],
        megatron=middle["megatron"],
        bound=bound(everything),
        bound_tight=bound_tight(everything),
        overlaps=overlaps,
    )


def _tight_floor(times: Times, forward: Times | None, picked: list[int]) -> float:
    matmul, comm = _least(times, picked)
    if forward is None:
        return max(matmul, comm)
    matmul_forward, comm_forward = _least(forward, picked)
    matmul_backward, comm_backward = matmul - matmul_forward, comm - comm_forward
    return max(matmul_forward, comm_forward) + max(matmul_backward, comm_backward)


def _least(times: Times, picked: list[int]) -> tuple[float, float]:
    comm = min(_median(times["comm"], picked), _median(times["comm in pieces"], picked))
    return _median(times["matmul"], picked), comm


def _interval(statistic: Callable[[list[int]], float | None], rounds: int) -> tuple[float | None, float | None]:
    """Return the 95% bootstrap interval; whole rounds are resampled, so that pairs stay paired."""
    if rounds < LEAST_ROUNDS:
        return None, None
    draw = random.Random(0)
    drawn = (statistic(draw.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    values = sorted(value for value in drawn if value is not None)
    if len(values) < RESAMPLES // 2:
        return None, None
    return values[int(0.025 * len(values))], values[int(0.975 * len(values))]


def _median(values: list[float], picked: list[int]) -> float:
    return median([values[index] for index in picked])
