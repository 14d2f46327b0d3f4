"""Turn times into figures: medians, speedups with their intervals, and E_bound (`e_bound`).

T_matmul and T_comm belong to the pass; each is timed alone, in the same rounds. T_comm is that of the whole collective
or of its pieces, whichever is faster. T is T_serial / speedup, so E_bound and the speedup agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ascend_parallel.tuning.bench.passes import SERIAL
from ascend_parallel.tuning.e_bound import e_bound
from ascend_parallel.tuning.measured.pass_parts import Parts

RESAMPLES = 2000


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
    variants = [
        _variant(other, ours, times[SERIAL], parts, result["sizes"].get(other, []))
        for other, ours in times.items()
        if other != SERIAL
    ]
    shape = {key: result[key] for key in ("run", "operator", "m", "k", "n", "kept")}
    return Row(
        layer=name,
        matmul=parts.computation,
        comm=parts.communication,
        serial=median(times[SERIAL]),
        variants=variants,
        **shape,
    )


def _variant(name: str, ours: list[float], serial: list[float], parts: Parts, sizes: list[int]) -> Variant:
    ratios = np.array(serial) / np.array(ours)
    speedup, (low, high) = float(np.median(ratios)), interval(ratios)
    whole = median(serial)
    share = e_bound(whole / speedup, whole, parts.computation, parts.communication) if low > 1 else None
    return Variant(name=name, seconds=median(ours), speedup=speedup, low=low, high=high, e_bound=share, sizes=sizes)


def interval(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of paired ratios."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
