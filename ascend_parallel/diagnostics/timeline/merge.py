"""Merge the files of all ranks into a trace, a report and a picture; note where overlap lost against a serial run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_parallel.diagnostics.timeline.align import Shift, align
from ascend_parallel.diagnostics.timeline.files import RankFile, TimelineError, read_run
from ascend_parallel.diagnostics.timeline.picture import COLOURS, MEANING, Picture, draw, picture
from ascend_parallel.diagnostics.timeline.table import Row, alone, kernel_of, table
from ascend_parallel.diagnostics.timeline.trace import trace
from ascend_parallel.text import replace_text
from ascend_parallel.text.templates import render

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


@dataclass(frozen=True)
class MergedTimeline:
    """One run of a folder with all ranks on one clock, and optionally a serial run to compare with."""

    folder: Path
    files: list[RankFile]
    shifts: list[Shift]
    notes: list[str]
    serial: list[RankFile] | None

    @property
    def about(self) -> str:
        """A description of the run in words."""
        return f"run {self.files[0].header['run']}, {self.files[0].header['ranks']} ranks"

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        return table(self.files, self.serial)

    def write(self, out: Path, png: bool | None) -> tuple[list[Path], list[str]]:
        """Write trace.json, report.html and timeline.png to `out`; return the files, and a note if there is no PNG.

        Without matplotlib, png=None writes no PNG and png=True raises `TimelineError`.
        """
        out.mkdir(parents=True, exist_ok=True)
        pictures = [] if self.serial is None else [picture(self.serial, "serial")]
        pictures.append(picture(self.files, "recorded" if self.serial is None else "overlapped"))
        written = [out / "trace.json", out / "report.html"]
        replace_text(written[0], json.dumps(trace(self.files), separators=(",", ":")))
        replace_text(written[1], report(pictures, self.rows(), self.shifts, self.notes, self.about))
        if png or (png is None and importlib.util.find_spec("matplotlib")):
            draw(pictures, out / "timeline.png")
            return [*written, out / "timeline.png"], []
        return written, [] if png is False else ["no timeline.png: it needs pip install matplotlib"]


def merge(folder: Path, run: str | None = None, against: Path | None = None) -> MergedTimeline:
    """Read all ranks' records of a run in `folder`, align their clocks, and return the merged run.

    `against`: the folder of a serial run to compare with. Raises `TimelineError` if a folder is unusable.
    """
    files, notes = read_run(folder, run)
    aligned, shifts = align(files)
    if not any(file.passes for file in aligned):
        raise TimelineError(f"{folder}: its files have no pass of a layer")
    if against is None:
        return MergedTimeline(folder, aligned, shifts, notes, None)
    serial_files, serial_notes = read_run(against)
    serial, _ = align(serial_files)
    comparison = _compare(table(aligned, serial), serial, against)
    return MergedTimeline(folder, aligned, shifts, [*notes, *serial_notes, *comparison], serial)


def _compare(rows: Sequence[Row], serial: Sequence[RankFile], folder: Path) -> list[str]:
    """Return notes for the reader on `rows`, whose serial times come from the files of `folder`."""
    calls = [call for file in serial for layer_pass in file.passes for call in layer_pass.calls]
    overlapped = sorted({kernel_of(call) for call in calls if not alone(call)})
    if overlapped:
        return [f"{folder} is not a serial run, but has {', '.join(overlapped)}: record a serial run with COC_MODE=1"]
    compared = [row for row in rows if row.serial is not None]
    if not compared:
        return [f"{folder} has no pass of the same layers and shapes: nothing is compared"]
    # The record of a fused operator does not show its communication.
    return _losses([row for row in compared if row.comm != 0])


def _losses(rows: Sequence[Row]) -> list[str]:
    lost = [row for row in rows if row.lost]
    if not lost:
        return []
    worst = max(lost, key=lambda row: row.total - _serial(row))
    total, serial = sum(row.total for row in rows), sum(map(_serial, rows))
    where = "here" if total > serial else "in part"
    return [
        f"overlap loses {where}: {len(lost)} of {len(rows)} passes that communicate took longer than in the serial "
        f"run, {worst.layer} {worst.direction} most ({worst.total:.2f} ms against {_serial(worst):.2f} ms); all "
        f"together took {total:.2f} ms against {serial:.2f} ms. Try COC_PARALLEL_NUM=auto, or COC_TUNE=plan.json, "
        "which measures in the run: both keep one chunk where overlap is slower"
    ]


def _serial(row: Row) -> float:
    assert row.serial is not None
    return row.serial
