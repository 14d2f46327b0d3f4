"""Time a layer of experts on a shaped link: serial, with nothing cut, and in groups of experts.

    python benchmarks/moe.py --link 400mbit             a few minutes
    python benchmarks/moe.py --link 400mbit --case 0    one of the cases alone

Forward and backward of gated experts on 2 ranks of one thread, with and without a shared expert. "no cut" has the
shared expert and the weight gradients under whole all-to-alls; the groups have both, too. The table has medians in ms,
medians of the ratio serial / own paired by round with bootstrap intervals, and the medians over max(T_comp, T_comm),
below which no schedule can come: T_comm is that of whole all-to-alls or of pieces, whichever is faster.
``ascend-parallel bench --moe`` times other sizes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from measuring import on_ranks, options_of, run, table

from ascend_parallel.tuning.bench.exchanges import figures_of, parts_of
from ascend_parallel.tuning.bench.experts import ExpertsCase

RANKS, GROUPS = 2, [2, 4]
# The shared expert has a fifth of all computation. The third case computes for longer than it communicates, the last is
# the first with torch's grouped matmul, as a group of grouped experts is one call.
CASES = (
    ExpertsCase(experts=8, rows=1024, hidden=1024, inner=512, shared=128),
    ExpertsCase(experts=8, rows=1024, hidden=1024, inner=640),
    ExpertsCase(experts=8, rows=1024, hidden=1024, inner=1024, shared=256),
    ExpertsCase(experts=8, rows=1024, hidden=1024, inner=512, shared=128, grouped=True),
)


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=9, json=True)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="one case alone; default: all")
    parser.add_argument("--rows", type=int, help="rows of a rank; default: those of the case")
    options = parser.parse_args()
    cases = CASES if options.case is None else CASES[options.case : options.case + 1]
    cases = cases if options.rows is None else tuple(replace(case, rows=options.rows) for case in cases)
    lines, seconds = [], {}
    for case in cases:
        found = on_ranks(
            "ascend_parallel.tuning.bench.experts:measure",
            RANKS,
            link=options.link,
            title=str(case),
            case=asdict(case),
            groups=GROUPS,
            rounds=options.rounds,
        )
        times = found["times"]
        seconds[str(case)] = {"plain": times["serial"], **{str(count): times[f"{count} groups"] for count in GROUPS}}
        parts = parts_of(times)
        for figure in figures_of(times):
            first = figure.name == "serial"
            about = [str(case), *(f"{1e3 * part:.0f}" for part in parts), f"{sum(parts) / max(parts):.2f}"]
            ratio = f"{figure.speedup:.2f} ({figure.low:.2f}-{figure.high:.2f})"
            name = f"auto: {found['auto']}" if figure.name == "auto" else figure.name
            lines.append([*(about if first else [""] * 4), name, f"{1e3 * figure.seconds:.0f}", ratio])
            lines[-1].append(f"{figure.of_bound:.2f}")
    heads = ["layer", "T_comp", "T_comm", "ideal", "variant", "ms", "serial / own (95 %)", "ms / bound"]
    print(table(heads, lines))
    if options.json is not None:
        options.json.write_text(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    run(main)
