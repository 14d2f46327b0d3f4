"""From times to figures: medians, gains with their intervals, and how much of what could be hidden was.

    E_bound = (T_serial - T) / (T_serial - max(T_matmul, T_comm)), at most 1

is 1 where the shorter of computation and communication has vanished, near 0 where next to nothing was won. T is
T_serial over the speedup, so that both figures say the same. T_matmul and T_comm are those of the pass, each alone
and timed in the same rounds: in backward the weight gradient counts as matmul; T_comm is the collective's whole or
in pieces, as it is faster. Only a variant that surely won has one: a share of nothing won, or of noise, means nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ascend_parallel.tuning.bench.passes import SERIAL
from ascend_parallel.tuning.measured.pass_parts import Parts

RESAMPLES = 2000
# Less to hide than this share of the serial time drowns in noise: no quotient is given.
LEAST_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a pass.

    speedup, low, high
        Median of the serial time over its own time in each round, and its 95 % interval.
    e_bound
        None if the interval reaches down to 1, or where there is next to nothing to hide.
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
        """Whether it is faster than the serial path by more than noise: the whole interval lies above 1."""
        return self.low > 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pass; seconds. `kept` are the rows of each chunk that a plan of what was measured keeps."""

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
        """Seconds nobody can go below."""
        return max(self.matmul, self.comm)

    @property
    def best(self) -> Variant | None:
        """The fastest of the variants that surely won, or None: then the serial path is best."""
        return min((one for one in self.variants if one.won), key=lambda variant: variant.seconds, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "bound": self.bound, "best": self.best.name if self.best else SERIAL}


def rows_of(names: list[str], measured: list[dict[str, Any]]) -> list[Row]:
    """Summarise what the ranks measured; names are those of the cases."""
    return [_row(names[found["case"]], found) for found in measured]


def _row(name: str, found: dict[str, Any]) -> Row:
    parts, times = Parts(**found["parts"]), found["times"]
    matmul, comm = parts.computation, parts.communication
    serial = median(times[SERIAL])
    variants = [
        _variant(other, times[other], times[SERIAL], max(matmul, comm), found["sizes"].get(other, []))
        for other in times
        if other != SERIAL
    ]
    shape = {key: found[key] for key in ("run", "operator", "m", "k", "n", "kept")}
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
