"""Make the report: a self-contained HTML page with the pictures and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ascend_parallel.diagnostics.timeline.align import Shift
from ascend_parallel.diagnostics.timeline.picture import COLOURS, MEANING, Picture
from ascend_parallel.diagnostics.timeline.table import Row
from ascend_parallel.templates import render

TEMPLATE = Path(__file__).with_name("report.html.jinja")

# (heading, value, format, meaning)
Column = tuple[str, Callable[[Row], float | None], str, str]
COLUMNS: list[Column] = [
    ("T", lambda row: row.total, ".2f", "median of the whole pass, on the rank where it is longest"),
    ("T_mm", lambda row: row.matmul, ".2f", "all matmuls of the pass, with the weight gradient"),
    ("T_comm", lambda row: row.comm, ".2f", "time in which at least one collective of the pass ran"),
    ("exposed", lambda row: row.exposed, ".2f", "communication or waiting for it while the rank computed nothing"),
    ("hidden", lambda row: row.hidden, ".0%", "share of T_comm beside a computation"),
    ("serial", lambda row: row.serial, ".2f", "T of the same pass in the serial run"),
    (
        "E_bound",
        lambda row: row.e_bound,
        ".2f",
        "1: all that can be hidden was hidden; 0: nothing was, or overlap lost",
    ),
]


def report(
    pictures: Sequence[Picture], rows: Sequence[Row], shifts: Sequence[Shift], notes: Sequence[str], about: str
) -> str:
    """Return the page; `about` describes the run, `notes` are warnings for the reader."""
    total = max((picture.milliseconds for picture in pictures), default=0.0) or 1.0
    return render(
        TEMPLATE,
        about=about,
        pictures=pictures,
        total=total,
        ticks=ticks(total),
        colours=COLOURS,
        meaning=MEANING,
        notes=notes,
        rows=rows,
        columns=columns(rows),
        cell=cell,
        shifts=shifts,
        clock=clock,
    )


def ticks(total: float) -> list[float]:
    """Return about a dozen round times from 0 to `total` ms."""
    step = next(step * 10.0**power for power in range(-4, 16) for step in (1, 2, 5) if total <= 14 * step * 10.0**power)
    return [number * step for number in range(int(total / step) + 1)]


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns to show; the serial column only with a serial run."""
    compared = any(row.serial is not None for row in rows)
    return [column for column in COLUMNS if compared or column[0] != "serial"]


def clock(shift: Shift) -> str:
    """Return, in words, how a rank's times were shifted to the common clock."""
    error = "an unknown error" if shift.error is None else f"at most {shift.error / 1e3:.0f} µs of error"
    return f"rank {shift.rank}: {shift.offset / 1e3:+.0f} µs, {error}; {shift.how}"


def cell(value: float | None, form: str) -> str:
    """Return a number as text, or "-" for None."""
    return "-" if value is None else format(value, form)
