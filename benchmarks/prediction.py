"""Set the model's prediction of every pass beside its measurement, on links of several rates.

    python benchmarks/prediction.py --json prediction.json     about 12 minutes; needs root for the links
    python benchmarks/prediction.py --table prediction.json    the table of docs/predict.md from what was measured

The prediction knows the times of a pass's parts alone (its matmul, its weight gradient, its collective whole and
half), and nothing of how they run together. Shapes are chosen so that communication takes about 2, 1.5 and 1
times as long as the matmul of forward.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from ascend_parallel.bench.passes import SERIAL
from ascend_parallel.layer_choices import Pass
from ascend_parallel.measuring.link import LinkError, shaped_link
from ascend_parallel.measuring.ranks import RankError, call_on_ranks
from ascend_parallel.planning.measure import Case, Parts
from ascend_parallel.planning.tuner import seconds

RANKS = 2
M, N = 2048, 1024
# K by rate: an all-reduce of [2048, 1024] fp32 takes about 71 ms over 1 Gbit/s, and a thread of the machine that
# the table was made on multiplies at about 90 GFlop/s. What the ratio really is stands in the table.
RATES: dict[str, tuple[int, ...]] = {
    "500mbit": (1536, 2048, 3072),
    "1gbit": (768, 1024, 1536),
    "2gbit": (384, 512, 768),
    "4gbit": (192, 256, 384),
    "loopback": (128, 256, 512),
}
LAYERS = (("row", False), ("row", True), ("column", True))
CHUNKS = [2, 4, 8]
SECONDS_A_RATE = 600


@dataclass(frozen=True, kw_only=True)
class Line:
    """One pass at one rate, cut in one way; seconds."""

    rate: str
    layer: str
    run: str
    m: int
    k: int
    n: int
    name: str
    sizes: tuple[int, ...]
    matmul: float
    comm: float
    serial: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the measurement."""
        return self.predicted / self.measured - 1

    @property
    def e_bound(self) -> float | None:
        """How much of what could be hidden was; None where there is less than 3 % to hide."""
        to_hide = self.serial - max(self.matmul, self.comm)
        return (self.serial - self.measured) / to_hide if to_hide > 0.03 * self.serial else None


def main() -> int:
    """Measure, or print what was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("prediction.json"), help="where to keep what is measured")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing, print the table of this file")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.table is None:
        found = {rate: measure(rate, options.rounds) for rate in options.rates}
        options.json.write_text(json.dumps(found) + "\n")
    else:
        found = json.loads(options.table.read_text())
    lines = [line for rate, result in found.items() for line in lines_of(rate, result["passes"])]
    sys.stdout.write(markdown(lines) + "\n\n" + summary(lines) + "\n")
    return 0


def measure(rate: str, rounds: int) -> dict[str, Any]:
    """Time every pass of every shape at one rate."""
    cases = [
        {
            "kind": kind,
            "rows": M // RANKS if kind == "column" and parallel else M,
            "n": N if kind == "row" else k,
            "k": k if kind == "row" else N,
            "dtype": "float32",
            "device": "cpu",
            "sequence_parallel": parallel,
        }
        for k in RATES[rate]
        for kind, parallel in LAYERS
    ]
    link = nullcontext([]) if rate == "loopback" else shaped_link(rate, RANKS)
    with link as ends, Console(stderr=True).status(rate) as status:
        found: dict[str, Any] = call_on_ranks(
            "ascend_parallel.bench.passes:measure",
            RANKS,
            limit=SECONDS_A_RATE,
            ends=ends,
            on_progress=lambda line: status.update(f"{rate}: " + line.replace("[", r"\[")),
            cases=cases,
            chunks=CHUNKS,
            fused=False,
            rounds=rounds,
        )
    return found


def lines_of(rate: str, passes: list[dict[str, Any]]) -> list[Line]:
    """Predict each variant of each pass from its parts."""
    lines = []
    for found in passes:
        parts = Parts(**found["parts"])
        one = Pass(*(found[name] for name in ("run", "operator", "m", "k", "n")))
        case = Case(
            kind=found["kind"],
            rows=0,
            n=0,
            k=0,
            dtype=torch.float32,
            device="cpu",
            sequence_parallel=found["sequence_parallel"],
        )
        backward = one.run == "backward"
        regathers = backward and case.kind == "column" and case.sequence_parallel
        for name, sizes in found["sizes"].items():
            lines.append(
                Line(
                    rate=rate,
                    layer=case.kind + (", sequence" if case.sequence_parallel else ", all-reduce"),
                    run=one.run,
                    m=one.m,
                    k=one.k,
                    n=one.n,
                    name=name,
                    sizes=tuple(sizes),
                    matmul=parts.matmul + (parts.weight_gradient if backward else 0.0),
                    comm=parts.collective + (parts.gather if regathers else 0.0),
                    serial=median(found["times"][SERIAL]),
                    measured=median(found["times"][name]),
                    predicted=seconds(case, one, parts, RANKS, sizes),
                )
            )
    return lines


def markdown(lines: list[Line]) -> str:
    """Return the table: a line per pass and cut."""
    columns = ("link", "layer", "pass", "M,K,N", "T_mm", "T_comm", "cut", "measured", "predicted", "error")
    columns = (*columns, "serial / measured", "E_bound")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in lines:
        e_bound = "" if line.e_bound is None else f"{line.e_bound:.2f}"
        cut = line.name if line.name != "model" else "model: " + " ".join(map(str, line.sizes))
        cells = [line.rate, line.layer, line.run, f"{line.m},{line.k},{line.n}"]
        cells += [f"{1e3 * value:.1f}" for value in (line.matmul, line.comm)]
        cells += [cut, f"{1e3 * line.measured:.1f}", f"{1e3 * line.predicted:.1f}", f"{100 * line.error:+.0f} %"]
        rows.append(f"| {' | '.join([*cells, f'{line.serial / line.measured:.2f}', e_bound])} |")
    return "\n".join(rows)


def summary(lines: list[Line]) -> str:
    """Return the figures that the table comes to."""
    errors = sorted(abs(line.error) for line in lines)
    text = [f"{len(lines)} passes and cuts: median error {100 * median(errors):.1f} %, nine of ten below "]
    text[0] += f"{100 * errors[int(0.9 * len(errors))]:.1f} %."
    for rate in dict.fromkeys(line.rate for line in lines):
        own = median(abs(line.error) for line in lines if line.rate == rate)
        text.append(f"{rate}: median error {100 * own:.1f} %.")
    overlapped = [line for line in lines if line.name != SERIAL]
    equal = {key: min(found) for key, found in _by_pass(overlapped, lambda line: line.name != "model").items()}
    model = {key: found[0] for key, found in _by_pass(overlapped, lambda line: line.name == "model").items()}
    better = sum(model[key] <= equal[key] for key in model if key in equal)
    text.append(f"The model's sizes were as fast as the best count or faster in {better} of {len(model)} passes.")
    for low, high in ((2.0, 99.0), (1.5, 2.0), (0.9, 1.1)):
        found = [best for best in _best_e_bounds(overlapped) if low <= best[0] < high]
        if found:
            middle = median(e_bound for _, e_bound in found)
            text.append(
                f"T_comm / T_mm from {low:g} to {high:g}: median E_bound {middle:.2f} over {len(found)} passes."
            )
    return "\n".join(f"- {line}" for line in text)


def _by_pass(lines: list[Line], wanted: Any) -> dict[tuple[Any, ...], list[float]]:
    found: dict[tuple[Any, ...], list[float]] = {}
    for line in filter(wanted, lines):
        found.setdefault((line.rate, line.layer, line.run, line.m, line.k, line.n), []).append(line.measured)
    return found


def _best_e_bounds(lines: list[Line]) -> list[tuple[float, float]]:
    """Return T_comm / T_mm and the best E_bound of every pass."""
    best: dict[tuple[Any, ...], tuple[float, float]] = {}
    for line in lines:
        key = (line.rate, line.layer, line.run, line.m, line.k, line.n)
        if line.e_bound is not None and (key not in best or line.e_bound > best[key][1]):
            best[key] = line.comm / line.matmul, line.e_bound
    return list(best.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LinkError, ValueError) as error:
        print(f"prediction.py: {error}", file=sys.stderr)
        sys.exit(2)
    except RankError as error:
        print(f"prediction.py: {error}", file=sys.stderr)
        sys.exit(1)
