"""Measure the host cost of chunks, beyond the matmuls and collectives themselves.

    python benchmarks/host_cost.py

On shapes too small for the work to matter, the chunked operators are timed beside the same calls of
``torch.mm(out=)`` and torch.distributed by hand, on views made beforehand, in the same order (host_calls.py). The
difference is the cost of checks, choice, chunks and bookkeeping.

layer: the linear layer's forward. torch.op: the operator through torch.library. wall: elapsed time, which other
programs disturb, and in which waiting for gloo's threads may hide a cost. cpu: processor time of the calling thread,
in which no cost can hide.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from ascend_parallel.tuning.launch.ranks import Job, RankError, run_ranks

CLOCKS = ("cpu", "wall")
CALLERS = ("layer", "torch.op")
GOAL_MICROSECONDS = 15
BUSY_LOAD = 0.5

# operator -> chunk count -> clock -> caller or "bare" -> seconds per call, one number per round
Measured = dict[str, dict[str, dict[str, dict[str, list[float]]]]]


def main() -> int:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Measure the operators' host cost per chunk.")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16], metavar="COUNT", help="default: 4 8 16")
    parser.add_argument("--rounds", type=int, default=40, help="default: 40")
    parser.add_argument("--calls", type=int, default=10, help="calls timed together in a round (default: 10)")
    options = parser.parse_args()
    if min(options.chunks) < 2 or len(set(options.chunks)) < 2:
        parser.error("--chunks: give two or more different counts, each 2 or more")
    if options.ranks < 2 or options.rounds < 1 or options.calls < 1:
        parser.error("--ranks needs 2 or more, --rounds and --calls 1 or more")
    chunks = sorted(set(options.chunks))
    arguments = {"chunks": chunks, "rounds": options.rounds, "calls": options.calls}
    load = os.getloadavg()[0]
    with Console(stderr=True).status("starting", refresh_per_second=2) as status:
        job = Job(
            program=(str(Path(__file__).with_name("host_calls.py")),),
            arguments=arguments,
            ranks=options.ranks,
            limit=600,
        )
        measured: Measured = run_ranks(job, status.update)
    print_table(measured, chunks, Console())
    print(f"bare: microseconds a call. The others: microseconds a chunk beyond that; the goal is {GOAL_MICROSECONDS}.")
    print(f"Medians over {options.rounds} rounds, of the slowest rank. +1: cost of one more chunk.")
    if load > BUSY_LOAD:
        print(f"The machine was busy before (load {load:.1f}): wall is unreliable.")
    return 0


def print_table(measured: Measured, chunks: list[int], console: Console) -> None:
    """Print one line per operator and chunk count, and one for the cost of each further chunk."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("operator", no_wrap=True)
    for heading in ("chunks", *(f"{clock}\n{what}" for clock in CLOCKS for what in ("bare", *CALLERS))):
        table.add_column(heading, justify="right")
    for operator, by_count in measured.items():
        table.add_section()
        extra = {count: differences(by_count[str(count)]) for count in chunks}
        for count in chunks:
            label = operator if count == chunks[0] else ""
            cells = [f"{time:.0f}" if per is None else f"{per / count:.1f}" for time, per in extra[count]]
            table.add_row(label, str(count), *cells)
        least, most = chunks[0], chunks[-1]
        rises = [
            "" if high is None or low is None else f"{(high - low) / (most - least):.1f}"
            for (_, low), (_, high) in zip(extra[least], extra[most], strict=True)
        ]
        table.add_row("", "+1", *rises)
    console.print(table)


def differences(by_clock: dict[str, dict[str, list[float]]]) -> list[tuple[float, float | None]]:
    """Return, by column, the median microseconds per call and the median excess over the bare calls."""
    columns: list[tuple[float, float | None]] = []
    for clock in CLOCKS:
        times = by_clock[clock]
        columns.append((median(times["bare"]) * 1e6, None))
        for caller in CALLERS:
            # Paired by round, so that a disturbed round affects only one difference.
            pairs = zip(times[caller], times["bare"], strict=True)
            columns.append((median(times[caller]) * 1e6, median(ours - bare for ours, bare in pairs) * 1e6))
    return columns


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RankError as error:
        print(f"host_cost.py: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
