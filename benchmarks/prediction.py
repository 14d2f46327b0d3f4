"""Compare the model's prediction of every pass with its measurement, on links of several rates.

    python benchmarks/prediction.py --json prediction.json     about 20 minutes
    python benchmarks/prediction.py --table prediction.json    its tables
    python benchmarks/prediction.py --table prediction.json --data benchmarks/data    the rows as files

docs/predicted-and-measured.md has the summary of the rows in data/prediction.csv and data/prediction_again.csv.

The model gets the times of a pass's parts alone (its matmuls; its collective whole, in pieces and of a few rows) and
the share of its speed that each lane keeps beside the other. It gets no time of an overlapped call. Parts and calls are
timed in the same rounds. Then the fastest cut, the fastest equal chunks and one chunk are timed again, alone. Shapes
are chosen so that communication takes about 2, 1.5 and 1 times as long as the matmul of forward.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import gain, on_ranks, options_of, run, table

from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.rows import ROW_TILE
from ascend_parallel.overlap.layer_shape import LayerOperator
from ascend_parallel.tuning.bench.passes import SERIAL
from ascend_parallel.tuning.bench.shapes import as_plain, shape_linears
from ascend_parallel.tuning.e_bound import e_bound
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown, seconds

RANKS = 2
M, N = 2048, 1024
# K by rate: an all-reduce of [2048, 1024] fp32 takes about 71 ms over 1 Gbit/s, and a thread of the table's machine
# multiplies at about 90 GFlop/s. The table has the measured ratios.
RATES: dict[str, tuple[int, ...]] = {
    "500mbit": (1536, 2048, 3072),
    "1gbit": (768, 1024, 1536),
    "2gbit": (384, 512, 768),
    "4gbit": (192, 256, 384),
    "loopback": (128, 256, 512),
}
LAYERS = (("row", False), ("row", True), ("column", True))
ROUNDS = {"500mbit": 7, "1gbit": 9, "2gbit": 11, "4gbit": 15, "loopback": 15}
CHUNKS = [2, 4, 8]
SECONDS_A_RATE = 1200
Rows = list[list[str]]  # the heads of a table, and its lines
HEADS = ("link", "layer", "pass", "M,K,N", "T_mm", "T_comm", "cut")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The times of a pass at one rate with one choice of chunks; seconds."""

    rate: str
    layer: str
    operator: LayerOperator
    name: str
    sizes: tuple[int, ...]
    breakdown: PassBreakdown
    serial: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measurement."""
        return self.predicted / self.measured - 1

    @property
    def e_bound(self) -> float | None:
        """The hidden share of what can be hidden."""
        return e_bound(self.measured, self.serial, self.breakdown.computation, self.breakdown.communication)

    @property
    def cells(self) -> list[str]:
        """The cells of the pass and of its chunks."""
        name = self.name if not self.name.startswith("model") else f"{self.name}: {' '.join(map(str, self.sizes))}"
        problem = self.operator.matmul
        shape = f"{problem.m},{problem.k},{problem.n}"
        times = [f"{1e3 * value:.1f}" for value in (self.breakdown.computation, self.breakdown.communication)]
        return [self.rate, self.layer, self.operator.direction, shape, *times, name]


@dataclass(frozen=True, kw_only=True)
class Final:
    """The second timing of a pass: the fastest cut against one chunk, the best uneven against the best equal chunks."""

    line: Line
    over_serial: float
    equal: str | None
    uneven: Line | None
    over_equal: float | None
    kept: bool


def main() -> None:
    """Measure, or print the tables of a file."""
    parser = options_of(__doc__, link=False)
    parser.add_argument("--json", type=Path, default=Path("prediction.json"), help="file for the measurements")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing, print the table of this file")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="write the rows there, print the summary")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rounds", type=int, help="timings of every call; default: 7 on the slowest link, 15 at most")
    options = parser.parse_args()
    if options.table is None:
        results = {rate: measure(rate, options.rounds or ROUNDS[rate]) for rate in options.rates}
        options.json.write_text(json.dumps(results) + "\n")
    else:
        results = json.loads(options.table.read_text())
    lines, finals = [], []
    for rate, result in results.items():
        for measured in result["passes"]:
            own = lines_of(rate, measured)
            lines += own
            finals.append(final_of(own, measured))
    if options.data is None:
        tables = [table(heads, rows) for heads, *rows in (tuned(finals), timed(lines))]
        print("\n\n".join([summary(lines, finals), *tables]))
        return
    for name, rows in (("prediction", timed(lines)), ("prediction_again", tuned(finals))):
        with (options.data / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    print(summary(lines, finals))


def measure(rate: str, rounds: int) -> dict[str, Any]:
    """Time every pass of every shape at one rate."""
    cases = []
    for k in RATES[rate]:
        for kind, parallel in LAYERS:
            shape = f"{M},{k},{N}" if kind == "row" else f"{M},{N},{k}"
            linears = shape_linears([shape], [kind], RANKS, parallel, torch.float32, "cpu")
            cases += [as_plain(linear.shape) for linear in linears]
    arguments = {"cases": cases, "chunks": CHUNKS, "fused": False, "rounds": rounds, "equal": True}
    link = None if rate == "loopback" else rate
    target = "ascend_parallel.tuning.bench.passes:measure"
    result: dict[str, Any] = on_ranks(target, RANKS, link=link, limit=SECONDS_A_RATE, title=f"{rate}:", **arguments)
    return result


def lines_of(rate: str, measured: dict[str, Any]) -> list[Line]:
    """Predict each variant of a pass from its parts."""
    breakdown = PassBreakdown(**measured["parts"])
    direction, name, *sizes = (measured[name] for name in ("run", "operator", "m", "k", "n"))
    operator = LayerOperator(direction, Matmul(name, *sizes, torch.float32, "cpu", RANKS))
    layer = measured["kind"] + (", sequence" if measured["sequence_parallel"] else ", all-reduce")
    return [
        Line(
            rate=rate,
            layer=layer,
            operator=operator,
            name=name,
            sizes=tuple(sizes),
            breakdown=breakdown,
            serial=median(measured["times"][SERIAL]),
            measured=median(measured["times"][name]),
            predicted=seconds(operator.matmul, breakdown, sizes),
        )
        for name, sizes in measured["sizes"].items()
    ]


def final_of(lines: list[Line], measured: dict[str, Any]) -> Final:
    """Compare the second timings round by round."""
    again, by_name = measured["again"], {line.name: line for line in lines}
    names = [name for name in again if name != SERIAL]
    best = min(names, key=lambda name: median(again[name]), default=SERIAL)
    equal = next((name for name in names if is_equal(by_name[name])), None)
    uneven = next((name for name in names if not is_equal(by_name[name])), None)
    return Final(
        line=by_name[best],
        over_serial=gain(again[SERIAL], again[best]),
        equal=equal,
        uneven=uneven and by_name[uneven],
        over_equal=gain(again[equal], again[uneven]) if equal and uneven else None,
        kept=len(measured["kept"]) > 1,
    )


def is_equal(line: Line) -> bool:
    """Return whether all chunks have the same rows, within a tile."""
    return max(line.sizes) - min(line.sizes) <= ROW_TILE


def timed(lines: list[Line]) -> Rows:
    """Return the table of the first timings: a line per pass and cut."""
    rows = [[*HEADS, "measured", "predicted", "error", "serial / measured", "E_bound"]]
    for line in lines:
        share = "" if line.e_bound is None else f"{line.e_bound:.2f}"
        cells = [f"{1e3 * line.measured:.1f}", f"{1e3 * line.predicted:.1f}", f"{100 * line.error:+.0f} %"]
        rows.append([*line.cells, *cells, f"{line.serial / line.measured:.2f}", share])
    return rows


def tuned(finals: list[Final]) -> Rows:
    """Return the table of the second timings: a line per pass."""
    rows = [[*HEADS, "serial / ours", "kept", "best uneven", "best equal", "equal / uneven"]]
    for final in finals:
        uneven = final.uneven.cells[-1] if final.uneven else ""
        ratio = "" if final.over_equal is None else f"{final.over_equal:.2f}"
        cells = [f"{final.over_serial:.2f}", "yes" if final.kept else "one chunk", uneven, final.equal or "", ratio]
        rows.append([*final.line.cells, *cells])
    return rows


def summary(lines: list[Line], finals: list[Final]) -> str:
    """Return the summary of the tables."""
    errors = sorted(abs(line.error) for line in lines)
    text = [f"{len(lines)} passes and cuts: median error {100 * median(errors):.1f} %, nine of ten below "]
    text[0] += f"{100 * errors[int(0.9 * len(errors))]:.1f} %."
    for rate in dict.fromkeys(line.rate for line in lines):
        own = median(abs(line.error) for line in lines if line.rate == rate)
        text.append(f"{rate}: median error {100 * own:.1f} %.")
    text += [_kept(finals), _uneven(finals)]
    for low, high in ((2.0, 99.0), (1.5, 2.0), (0.9, 1.1)):
        best = [pair for pair in _best_e_bounds(lines) if low <= pair[0] < high]
        if best:
            middle = median(e_bound for _, e_bound in best)
            text.append(f"T_comm / T_mm from {low:g} to {high:g}: median E_bound {middle:.2f} over {len(best)} passes.")
    return "\n".join(f"- {line}" for line in text)


def _kept(finals: list[Final]) -> str:
    gains = [final.over_serial for final in finals if final.kept]
    if not gains:
        return f"Kept after the second timing: none of {len(finals)} passes is overlapped; all keep one chunk."
    return (
        f"Kept after the second timing: {len(gains)} of {len(finals)} passes are overlapped, from "
        f"{min(gains):.2f} to {max(gains):.2f} times as fast as one chunk; the others keep one chunk."
    )


def _uneven(finals: list[Final]) -> str:
    gains = [final.over_equal for final in finals if final.over_equal is not None]
    if not gains:
        return f"Uneven and equal chunks were timed together in none of {len(finals)} passes."
    return (
        f"The best uneven chunks are faster than the best equal ones in {sum(ratio > 1 for ratio in gains)} of "
        f"{len(gains)} passes, round by round; median {median(gains):.3f} times as fast."
    )


def _best_e_bounds(lines: list[Line]) -> list[tuple[float, float]]:
    """Return T_comm / T_mm and the best E_bound of every pass."""
    best: dict[tuple[str, str, LayerOperator], tuple[float, float]] = {}
    for line in lines:
        key = (line.rate, line.layer, line.operator)
        if line.e_bound is not None and (key not in best or line.e_bound > best[key][1]):
            best[key] = line.breakdown.communication / line.breakdown.computation, line.e_bound
    return list(best.values())


if __name__ == "__main__":
    run(main)
