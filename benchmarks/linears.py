"""Time tensor-parallel linear layers: serial, overlapped, and Megatron-core's own, beside a lower bound.

    python benchmarks/linears.py --link 1gbit                     default shapes, about four minutes
    python benchmarks/linears.py --link 1gbit --modes row-all-reduce --shapes 2048,1024,1024 --chunks 4 8

M, K, N are those of each rank's matmul [M, K] x [K, N]; M counts the rows of all ranks. cases.py has the
operations of each pass, measure.py the timing, summary.py the definition of E.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from summary import LEAST_ROUNDS, summarize
from table import Line, print_table

from ascend_parallel.tuning.launch.link import End, LinkError, parse_rate, shaped_link
from ascend_parallel.tuning.launch.ranks import Job, RankError, run_ranks

# Per mode: a shape whose communication takes at least 1.5 times as long as its matmuls over 1 Gbit/s with two ranks of
# one thread each, and a shape with about equal parts (of forward; of both passes if forward moves nothing).
DEFAULT_SHAPES = {
    "row-all-reduce": ["2048,768,1024", "2048,1536,1024"],
    "row-sequence": ["2048,512,1024", "2048,1024,1024"],
    "column-all-reduce": ["2048,1024,256", "2048,1024,512"],
    "column-sequence": ["2048,1024,512", "2048,1024,1024"],
}
DTYPES = ("float32", "float64", "bfloat16", "float16")
STARTUP_SECONDS = 90
# A round is quiet if other programs use at most this share of the machine's processors.
QUIET = 0.05


def main() -> int:
    """Read the command line, measure, print."""
    options = parse_options()
    console, progress = Console(), Console(stderr=True)
    cells = [
        {"mode": mode, **dict(zip("mkn", shape, strict=True))}
        for mode in options.modes
        for shape in (options.shapes or [parse_shape(text) for text in DEFAULT_SHAPES[mode]])
    ]
    check_cells(cells, options.ranks)
    results = measure(options, cells, progress)
    lines = summarize_cells(cells, results["cells"], options.chunks)
    conditions = describe(options, results)
    print_table(console, lines, conditions)
    if options.json:
        write_json(options.json, options, conditions, cells, results, lines)
        progress.print(f"written: {options.json}", markup=False, highlight=False)
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Time tensor-parallel linear layers, serial, overlapped and Megatron-core's own.",
        epilog="Exit status: 0 done, 1 a rank failed, 2 wrong options or no right to build the link.",
    )
    parser.add_argument("--link", metavar="RATE", help="a link between the ranks, such as 1gbit (needs root)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--modes", nargs="+", choices=DEFAULT_SHAPES, default=list(DEFAULT_SHAPES), help="default: all")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="M,K,N", help="default: two per mode")
    parser.add_argument("--chunks", nargs="+", type=int, default=[2, 4, 8], metavar="COUNT", help="default: 2 4 8")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--repeats", type=int, default=25, help="quiet rounds to time (default: 25)")
    parser.add_argument("--seconds", type=float, default=200, help="time limit for all rounds (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measured time")
    options = parser.parse_args()
    if min(options.chunks) < 2 or max(options.chunks) > 64:
        parser.error("--chunks: give counts from 2 to 64; 1 is the serial path, timed anyway")
    if options.repeats < 1 or options.seconds <= 0 or not 2 <= options.ranks <= 64:
        parser.error("--repeats needs 1 or more, --seconds more than 0, --ranks 2 to 64")
    if options.link is not None:
        try:
            parse_rate(options.link)
        except ValueError as error:
            parser.error(f"--link: {error}")
    if options.json and not os.access(options.json.parent, os.W_OK):
        parser.error(f"--json: cannot write to the folder {options.json.parent}")
    options.chunks = sorted(set(options.chunks))
    return options


def parse_shape(text: str) -> tuple[int, int, int]:
    """Read ``M,K,N``."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: give M,K,N such as 2048,1024,1024")
    m, k, n = map(int, parts)
    return m, k, n


def check_cells(cells: list[dict[str, Any]], ranks: int) -> None:
    """Refuse rows that the ranks do not divide."""
    for cell in cells:
        if cell["mode"].endswith("sequence") and cell["m"] % ranks:
            raise ValueError(f"--shapes: M={cell['m']} is not divisible by the {ranks} ranks, as {cell['mode']} needs")


def measure(options: argparse.Namespace, cells: list[dict[str, Any]], console: Console) -> dict[str, Any]:
    """Run the ranks and show their progress."""
    arguments = {
        "cells": cells,
        "chunks": options.chunks,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "quiet": quiet_limit(),
    }
    link: AbstractContextManager[list[End]] = nullcontext([])
    if options.link:
        link = shaped_link(options.link, options.ranks)
    with link as ends, console.status("starting", refresh_per_second=2) as status:
        job = Job(
            program=(str(Path(__file__).with_name("measure.py")),),
            arguments=arguments,
            ranks=options.ranks,
            limit=STARTUP_SECONDS + 3 * options.seconds + 20 * len(cells),
            ends=ends,
        )

        def show(line: str) -> None:
            status.update(line.replace("[", r"\["))
            if not console.is_terminal and line.endswith("checking"):
                console.print(line, markup=False, highlight=False)

        results: dict[str, Any] = run_ranks(job, show)
    return results


def summarize_cells(cells: list[dict[str, Any]], measured: list[dict[str, Any]], chunks: list[int]) -> list[Line]:
    """Summarize every pass with a collective."""
    lines = []
    for cell, result in zip(cells, measured, strict=True):
        others = result["others"]
        picked = quiet_rounds(others)
        disturbed = max(others[number] for number in picked) > quiet_limit()
        passes = {
            name: {case: [values[index] for index in picked] for case, values in times.items()}
            for name, times in result["passes"].items()
        }
        for name, times in passes.items():
            if "serial" in times:
                forward = None if name == "forward" else passes["forward"]
                shape = f"{cell['m']},{cell['k']},{cell['n']}"
                summary = summarize(times, forward, chunks)
                lines.append(Line(mode=cell["mode"], shape=shape, name=name, disturbed=disturbed, summary=summary))
    return lines


def quiet_rounds(others: list[float]) -> list[int]:
    """Return the indices of the quiet rounds, or of all rounds if too few are quiet."""
    quiet = [number for number, used in enumerate(others) if used <= quiet_limit()]
    return quiet if len(quiet) >= LEAST_ROUNDS else list(range(len(others)))


def quiet_limit() -> float:
    """Return the number of processors that other programs may use in a quiet round."""
    return QUIET * (os.cpu_count() or 1)


def describe(options: argparse.Namespace, results: dict[str, Any]) -> str:
    """Return the conditions of the measurement, and whether other programs disturbed it."""
    link = f"a link of {options.link}" if options.link else "loopback (no link: communication is nearly free)"
    versions = results["versions"]
    text = (
        f"{options.ranks} ranks over {link}, {options.dtype}, 1 thread each, {versions['cpus']} CPUs, "
        f"torch {versions['torch']}, megatron-core {versions['megatron-core']}."
    )
    disturbed = sum(used > quiet_limit() for cell in results["cells"] for used in cell["others"])
    if disturbed:
        text += (
            f" Other programs disturbed {disturbed} rounds: left out, but where a * stands, which is not to be trusted."
        )
    return text


def write_json(
    path: Path,
    options: argparse.Namespace,
    conditions: str,
    cells: list[dict[str, Any]],
    results: dict[str, Any],
    lines: list[Line],
) -> None:
    """Write the summaries and every time."""
    value = {
        "conditions": conditions,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "link": options.link,
        "ranks": options.ranks,
        "dtype": options.dtype,
        "versions": results["versions"],
        "summaries": [asdict(line) for line in lines],
        "measured": [{**cell, **result} for cell, result in zip(cells, results["cells"], strict=True)],
    }
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LinkError, ValueError) as error:
        print(f"linears.py: {error}", file=sys.stderr)
        sys.exit(2)
    except RankError as error:
        print(f"linears.py: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
