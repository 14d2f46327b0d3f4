"""Time the shared-memory kernel beside matmul and gloo in turn, chunks, and a lower bound of its memory traffic.

    python benchmarks/fused.py                                    about three minutes
    python benchmarks/fused.py --operators matmul_all_reduce --shapes 4096,8,2048 --json fused.json

M, K, N are those of the whole matmul [M, K] x [K, N]; M counts the rows of all ranks. fused_calls.py has the
timed calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ascend_parallel.tuning.launch.ranks import Job, RankError, run_ranks

# From little communication to almost nothing else. The result of 16,8,128 is 8 KB, that of 4096,8,2048 32 MB.
DEFAULT_SHAPES = {
    "matmul_all_reduce": [
        (16, 8, 128),
        (64, 64, 1024),
        (256, 64, 1024),
        (1024, 64, 1024),
        (1024, 256, 1024),
        (2048, 1024, 1024),
        (4096, 8, 2048),
        (4096, 128, 2048),
    ],
    "matmul_reduce_scatter": [(64, 64, 1024), (1024, 64, 1024), (1024, 256, 1024), (4096, 64, 1024)],
    "all_gather_matmul": [(64, 1024, 64), (1024, 1024, 64), (1024, 1024, 256), (4096, 1024, 64)],
}
DTYPES = ("float32", "bfloat16", "float16")
STARTUP_SECONDS = 90
LEAST_ROUNDS = 5
# A round is quiet if other programs use at most this share of the machine's processors.
QUIET = 0.05
COLUMNS = ("M,K,N", "bytes", "rounds", "matmul", "gloo", "serial", "chunked", "shm", "start", "bound", "exchange")
RATIOS = ("serial/shm", "chunked/shm", "gloo/exchange")
LEGEND = """\
Milliseconds: medians over the rounds of the slowest rank's time; quotients: medians of the rounds' quotients.
bytes: what an all-reduce or reduce-scatter sums, what an all-gather gathers. gloo: the collective alone. serial: matmul
and gloo in turn. shm: the kernel; start: the same through the operator's choice of a kernel. bound: matmul, and the
bytes that shm moves at the speed of a copy. exchange: what shm takes beyond the matmul, where the memory of the
results is there, as it is for gloo. *: other programs were busy, doubtful."""


def main() -> int:
    """Read the command line, measure, print."""
    options = parse_options()
    console, progress = Console(), Console(stderr=True)
    cells = [
        {"operator": operator, **dict(zip("mkn", shape, strict=True))}
        for operator in options.operators
        for shape in (options.shapes or DEFAULT_SHAPES[operator])
    ]
    names = ("dtype", "rounds", "seconds", "ranks")
    arguments = {"cells": cells, **{name: getattr(options, name) for name in names}}
    program = (str(Path(__file__).with_name("fused_calls.py")),)
    limit = STARTUP_SECONDS + 3 * options.seconds
    with progress.status("starting", refresh_per_second=2) as status:
        job = Job(program=program, arguments=arguments, ranks=options.ranks, limit=limit)
        results = run_ranks(job, lambda line: status.update(line.replace("[", r"\[")))
    rows = [summarize(cell, result) for cell, result in zip(cells, results["cells"], strict=True)]
    conditions = (
        f"{options.ranks} ranks on one host, {options.dtype}, 1 thread each, {os.cpu_count()} CPUs, "
        f"torch {results['torch']}."
    )
    print_table(console, rows, conditions)
    if options.json:
        value = {"conditions": conditions, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "rows": rows, **results}
        options.json.write_text(json.dumps(value, indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time the shared-memory kernel.")
    every = list(DEFAULT_SHAPES)
    parser.add_argument("--operators", nargs="+", choices=every, default=every, help="default: all")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="M,K,N", help="default: some per operator")
    parser.add_argument("--ranks", type=int, default=2, help="2 to 8 (default: 2)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--rounds", type=int, default=40, help="quiet rounds to time (default: 40)")
    parser.add_argument("--seconds", type=float, default=180, help="time for all of them (default: 180)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every time measured")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0 or not 2 <= options.ranks <= 8:
        parser.error("--rounds needs 1 or more, --seconds more than 0, --ranks 2 to 8")
    if any(shape[0] % options.ranks for shape in options.shapes or []):
        parser.error(f"--shapes: M has to be divisible by the {options.ranks} ranks")
    return options


def parse_shape(text: str) -> tuple[int, int, int]:
    """Read ``M,K,N``."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: give M,K,N such as 2048,1024,1024")
    m, k, n = map(int, parts)
    return m, k, n


def summarize(cell: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return medians over the quiet rounds, or over all rounds if too few are quiet."""
    limit = QUIET * (os.cpu_count() or 1)
    quiet = [number for number, used in enumerate(result["others"]) if used <= limit]
    picked = quiet if len(quiet) >= LEAST_ROUNDS else list(range(len(result["others"])))
    times = {name: [values[number] for number in picked] for name, values in result["times"].items()}
    # A copy reads and writes the bytes once each.
    moves = [copy * result["moved"] / (2 * result["bytes"]) for copy in times["copy"]]
    times["bound"] = [sum(parts) for parts in zip(times["matmul"], moves, strict=True)]
    exchange = median([whole - product for whole, product in zip(times["exchange"], times["product"], strict=True)])
    return {
        **cell,
        "bytes": result["bytes"],
        "rounds": len(picked),
        "disturbed": picked is not quiet,
        **{name: median(values) for name, values in times.items()},
        "exchange": exchange,
        "serial/shm": quotient(times["serial"], times["shm"]),
        "chunked/shm": quotient(times["chunked"], times["shm"]),
        "gloo/exchange": median(times["gloo"]) / exchange if exchange > 0 else None,
    }


def quotient(above: list[float], below: list[float]) -> float:
    """Return the median of the rounds' quotients."""
    return median([numerator / divisor for numerator, divisor in zip(above, below, strict=True)])


def print_table(console: Console, rows: list[dict[str, Any]], conditions: str) -> None:
    """Print one line per shape."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("operator", *COLUMNS, *RATIOS):
        table.add_column(heading, justify="left" if heading == "operator" else "right", no_wrap=True)
    for row in rows:
        head = [row["operator"], f"{row['m']},{row['k']},{row['n']}", size(row["bytes"])]
        head.append(f"{row['rounds']}{'*' if row['disturbed'] else ''}")
        times = [f"{row[name] * 1e3:.3f}" for name in COLUMNS[3:]]
        table.add_row(*head, *times, *("-" if row[name] is None else f"{row[name]:.2f}" for name in RATIOS))
    if not console.is_terminal:
        console.width = max(console.width, 175)  # a file has no edge to wrap at
    console.print(table)
    console.print(f"{conditions}\n{LEGEND}", highlight=False)


def size(count: int) -> str:
    """Show bytes."""
    return f"{count / 2**20:.0f} MB" if count >= 2**20 else f"{count / 2**10:.0f} KB"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RankError as error:
        print(f"fused.py: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
