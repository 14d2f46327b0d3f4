"""Turn times into figures: medians, speedups with their intervals, and the share of the possible gain (E_bound).

    E_bound = (T_serial - T) / (T_serial - max(T_matmul, T_comm)), at most 1

E_bound is 1 if the shorter of computation and communication is hidden completely, and near 0 if almost nothing is
hidden. T is T_serial / speedup, so E_bound and the speedup agree. T_matmul and T_comm belong to the pass; each is timed
alone, in the same rounds. In backward, T_matmul includes the weight gradient. T_comm is that of the whole collective or
of its pieces, whichever is faster. E_bound is given only for a variant that is faster by more than noise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ascend_parallel.tuning.bench.passes import SERIAL
from ascend_parallel.tuning.measured.pass_parts import Parts

RESAMPLES = 2000
# No E_bound is given if less than this share of the serial time can be hidden: noise would dominate.
LEAST_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The figures of a pass run with one choice of chunks or kernel.

    speedup, low, high
        Median over the rounds of serial time / own time, and its 95 % interval.
    e_bound
        None if the interval reaches down to 1, or if almost nothing can be hidden.
    """

    name: str
    seconds: float
    speedup: float
    low: float
    high: float
    e_bound: float | None
    sizes: list[int]

    @property
    def won(self) -> bool:
        """Whether the variant beats the serial path by more than noise: the whole interval lies above 1."""
        return self.low > 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one pass; times in seconds. kept: the chunk sizes that the plan keeps."""

    layer: str
    run: str
    operator: str
    m: int
    k: int
    n: int
    matmul: float
    comm: float
    serial: float
    variants: list[Variant]
    kept: list[int]

    @property
    def bound(self) -> float:
        """The lower bound of the pass's seconds: max(T_matmul, T_comm)."""
        return max(self.matmul, self.comm)

    @property
    def best(self) -> Variant | None:
        """The fastest variant that won, or None if the serial path is best."""
        return min(
            (variant for variant in self.variants if variant.won), key=lambda variant: variant.seconds, default=None
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "bound": self.bound, "best": self.best.name if self.best else SERIAL}


def rows_of(names: list[str], measured: list[dict[str, Any]]) -> list[Row]:
    """Return the figures of each measured pass; names: the names of the cases."""
    return [_row(names[result["case"]], result) for result in measured]


def _row(name: str, result: dict[str, Any]) -> Row:
    parts, times = Parts(**result["parts"]), result["times"]
    matmul, comm = parts.computation, parts.communication
    serial = median(times[SERIAL])
    variants = [
        _variant(other, times[other], times[SERIAL], max(matmul, comm), result["sizes"].get(other, []))
        for other in times
        if other != SERIAL
    ]
    shape = {key: result[key] for key in ("run", "operator", "m", "k", "n", "kept")}
    return Row(layer=name, matmul=matmul, comm=comm, serial=serial, variants=variants, **shape)


def _variant(name: str, ours: list[float], serial: list[float], bound: float, sizes: list[int]) -> Variant:
    ratios = np.array(serial) / np.array(ours)
    speedup, (low, high) = float(np.median(ratios)), interval(ratios)
    whole = median(serial)
    to_hide, gained = whole - bound, whole - whole / speedup
    e_bound = min(1.0, gained / to_hide) if low > 1 and to_hide > LEAST_SHARE * whole else None
    return Variant(name=name, seconds=median(ours), speedup=speedup, low=low, high=high, e_bound=e_bound, sizes=sizes)


def interval(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of paired ratios."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
