"""Turn times into figures: medians, speedups with their intervals, and E_bound (`e_bound`); print and draw them.

T_matmul and T_comm belong to the pass; each is timed alone, in the same rounds. T_comm is that of the whole collective
or of its pieces, whichever is faster. T is T_serial / speedup, so E_bound and the speedup agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ascend_parallel.tuning.bench.passes import SERIAL
from ascend_parallel.tuning.e_bound import e_bound
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown

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


def result_rows(names: list[str], measured: list[dict[str, Any]]) -> list[Row]:
    """Return the figures of each measured pass; names: the names of the cases."""
    return [_row(names[result["case"]], result) for result in measured]


def _row(name: str, result: dict[str, Any]) -> Row:
    breakdown, times = PassBreakdown(**result["parts"]), result["times"]
    variants = [
        _variant(other, ours, times[SERIAL], breakdown, result["sizes"].get(other, []))
        for other, ours in times.items()
        if other != SERIAL
    ]
    shape = {key: result[key] for key in ("run", "operator", "m", "k", "n", "kept")}
    return Row(
        layer=name,
        matmul=breakdown.computation,
        comm=breakdown.communication,
        serial=median(times[SERIAL]),
        variants=variants,
        **shape,
    )


def _variant(name: str, ours: list[float], serial: list[float], breakdown: PassBreakdown, sizes: list[int]) -> Variant:
    (speedup, low, high), whole = speedup_of(serial, ours), median(serial)
    share = e_bound(whole / speedup, whole, breakdown.computation, breakdown.communication) if low > 1 else None
    return Variant(name=name, seconds=median(ours), speedup=speedup, low=low, high=high, e_bound=share, sizes=sizes)


def speedup_of(serial: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Return the median over the rounds of serial / own time, and its 95 % interval."""
    ratios = np.array(serial) / np.array(ours)
    return float(np.median(ratios)), *interval(ratios)


def interval(ratios: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of paired ratios."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def show(rows: list[Row], conditions: str, console: Console, *, every: bool = False, kept: bool = False) -> None:
    """Print a table with one line per pass: the best variant.

    every
        Print one line per variant instead.
    kept
        Add a column with the number of chunks in the plan. This number may differ from the best variant: a second
        comparison of fewer variants decides the plan, and a small gain is enough in that comparison.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layer", "pass", "[M, K] x [K, N]"):
        table.add_column(column)
    for column in ("T_matmul", "T_comm", "bound", "serial", "best", "ms", "speedup", "95 %", "E_bound"):
        table.add_column(column, justify="right")
    if kept:
        table.add_column("kept", justify="right")
    for row in rows:
        best = row.best
        last = [f"{len(row.kept)} chunks" if len(row.kept) > 1 else "serial"] if kept else []
        variants = row.variants if every else [best] if best else []
        head = [row.layer, row.run, f"{row.m},{row.k},{row.n}"]
        head += [f"{1e3 * value:.2f}" for value in (row.matmul, row.comm, row.bound, row.serial)]
        if not variants:
            table.add_row(*head, "serial", f"{1e3 * row.serial:.2f}", "1.00", "", "", *last)
        for variant in variants:
            between = f"{variant.low:.2f}-{variant.high:.2f}"
            e_bound = "" if variant.e_bound is None else f"{variant.e_bound:.2f}"
            figures = [f"{1e3 * variant.seconds:.2f}", f"{variant.speedup:.2f}", between, e_bound]
            table.add_row(*head, variant.name, *figures, *last)
    console.print(table)
    console.print(conditions, markup=False, highlight=False)


def plot(rows: list[Row], conditions: str, path: Path) -> None:
    """Draw one bar per pass and variant, and the bound; the suffix of `path` is the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.5 * len(rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(["serial", *(variant.name for row in rows for variant in row.variants)]))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        values = [
            row.serial if name == "serial" else next((v.seconds for v in row.variants if v.name == name), float("nan"))
            for row in rows
        ]
        colour = "0.6" if name == "serial" else None
        offsets = [index + (place + 0.5) * width - 0.4 for index in range(len(rows))]
        axes.bar(offsets, [1e3 * value for value in values], width, label=name, color=colour)
    for index, row in enumerate(rows):
        axes.hlines(1e3 * row.bound, index - 0.42, index + 0.42, color="black", linewidth=1.5)
    axes.hlines([], 0, 0, color="black", label="bound: max(T_matmul, T_comm)")
    axes.set_xticks(range(len(rows)), [f"{row.layer}\n{row.run}\n{row.m},{row.k},{row.n}" for row in rows], fontsize=8)
    axes.set_ylabel("ms, median")
    axes.legend(fontsize=8)
    axes.set_title(conditions, fontsize=8)
    figure.savefig(path, dpi=130)
