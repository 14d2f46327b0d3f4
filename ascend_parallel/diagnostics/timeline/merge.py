"""From the ranks' files of a folder to trace, report and picture."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from ascend_parallel.diagnostics.timeline.align import Shift, align
from ascend_parallel.diagnostics.timeline.comparison import compare
from ascend_parallel.diagnostics.timeline.files import RankFile, TimelineError, read_run, replace_text
from ascend_parallel.diagnostics.timeline.picture import picture
from ascend_parallel.diagnostics.timeline.png import draw
from ascend_parallel.diagnostics.timeline.report import report
from ascend_parallel.diagnostics.timeline.table import Row, table
from ascend_parallel.diagnostics.timeline.trace import trace


@dataclass(frozen=True)
class Merged:
    """One run of a folder, its ranks on one clock, beside a serial one or none."""

    folder: Path
    files: list[RankFile]
    shifts: list[Shift]
    notes: list[str]
    serial: list[RankFile] | None

    @property
    def about(self) -> str:
        """Which run it is, in words."""
        return f"run {self.files[0].header['run']}, {self.files[0].header['ranks']} ranks"

    def rows(self) -> list[Row]:
        """Return the table."""
        return table(self.files, self.serial)

    def write(self, out: Path, png: bool | None) -> tuple[list[Path], list[str]]:
        """Write trace.json, report.html and timeline.png to `out`; return the files, and why one is left out.

        png=None leaves the picture out where matplotlib is missing; True then raises `TimelineError`.
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
        return written, [] if png is False else ["no timeline.png: pip install 'ascend_parallel[plot]' for it"]


def merge(folder: Path, run: str | None = None, against: Path | None = None) -> Merged:
    """Read a folder, and that of a serial run to compare with; raises `TimelineError` if that cannot be."""
    files, notes = read_run(folder, run)
    aligned, shifts = align(files)
    if not any(file.passes for file in aligned):
        raise TimelineError(f"{folder}: its files hold no pass of a layer")
    if against is None:
        return Merged(folder, aligned, shifts, notes, None)
    other, more = read_run(against)
    serial, _ = align(other)
    said = compare(table(aligned, serial), serial, against)
    return Merged(folder, aligned, shifts, [*notes, *more, *said], serial)
