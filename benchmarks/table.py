"""Print the table of benchmarks/linears.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, zip_longest

from rich import box
from rich.console import Console
from rich.table import Table
from summary import Overlap, Summary

COLUMNS = (
    "pass",
    "rounds",
    "T_mm",
    "T_comm",
    "pieces",
    "T_seq",
    "Megatron",
    "chunks",
    "T_ovl",
    "E_bound",
    "95%",
    "E_tight",
    "ratio",
)
WIDTH = 134
LEGEND = """\
Milliseconds: medians over the rounds of the slowest rank's time. both: forward and backward. T_mm, T_comm: the
pass's matmuls alone, its collectives alone; pieces: the collectives in as many pieces as the largest chunk count.
T_seq: the layer with one chunk (its backward runs the weight gradient beside the collective, as Megatron-core does).
E_bound = (T_seq - T_ovl) / (T_seq - max(T_mm, T_comm)), with its 95% interval. E_tight: the same, with the floors
of forward and backward added and T_comm at its fastest. ratio: Megatron / T_ovl."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The lines of a pass of a layer and shape."""

    mode: str
    shape: str
    name: str
    disturbed: bool
    summary: Summary


def print_table(console: Console, lines: list[Line], conditions: str) -> None:
    """Print one line per pass and chunk count."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer\nM,K,N", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "pass" else "right", no_wrap=True)
    for (mode, shape), passes in groupby(lines, key=lambda line: (line.mode, line.shape)):
        rows = [row for line in passes for row in table_rows(line)]
        labels = [mode, shape] if len(rows) > 1 else [f"{mode}\n{shape}"]
        table.add_section()
        for label, row in zip_longest(labels, rows, fillvalue=""):
            table.add_row(label, *row)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)  # output to a file is not wrapped
    console.print(table)
    console.print(f"{conditions}\n{LEGEND}", highlight=False)


def table_rows(line: Line) -> list[list[str]]:
    """Return one row per chunk count; the first row has the values that do not depend on the count."""
    summary = line.summary
    times = (summary.matmul, summary.comm, summary.comm_in_pieces, summary.serial, summary.megatron)
    rounds = f"{summary.rounds}{'*' if line.disturbed else ''}"
    shared = [line.name, rounds, *map(milliseconds, times)]
    rows = [overlap_columns(overlap) for overlap in summary.overlaps]
    return [[*(shared if row is rows[0] else [""] * len(shared)), *row] for row in rows]


def overlap_columns(overlap: Overlap) -> list[str]:
    """Return the columns of one chunk count."""
    interval = "-" if overlap.e_bound_low is None else f"{overlap.e_bound_low:.2f} .. {overlap.e_bound_high:.2f}"
    return [
        str(overlap.chunks),
        milliseconds(overlap.seconds),
        quotient(overlap.e_bound),
        interval,
        quotient(overlap.e_tight),
        f"{overlap.megatron_over_ours:.2f}",
    ]


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, as text."""
    return f"{seconds * 1e3:.1f}"


def quotient(value: float | None) -> str:
    """Return a quotient as text, or a dash if there is none."""
    return "-" if value is None else f"{value:.2f}"
