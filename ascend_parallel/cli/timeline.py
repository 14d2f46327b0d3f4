"""The command `ascend-parallel timeline`."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ascend_parallel.cli.output import console, errors, progress_console
from ascend_parallel.text.tables import FittedTable, terminal_table

if TYPE_CHECKING:
    from ascend_parallel.diagnostics.timeline.merge import MergedTimeline
    from ascend_parallel.diagnostics.timeline.table import Row


def timeline(
    folder: Annotated[Path, typer.Argument(help="The folder that COC_TIMELINE named.")],
    against: Annotated[
        Path | None, typer.Option(help="Folder of a serial run (COC_MODE=1) to draw above and to compute E_bound with.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of a run in the folder; default: the latest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: the same folder.")] = None,
    png: Annotated[
        bool | None,
        typer.Option("--png/--no-png", help="Write timeline.png or not; default: if matplotlib is installed."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, for scripts.")] = False,
) -> None:
    """Merge the files of all ranks into trace.json (Perfetto), report.html and timeline.png; print the table.

    Example: COC_PARALLEL_NUM=4 COC_TIMELINE=spans torchrun ... ; ascend-parallel timeline spans
    """
    from ascend_parallel.diagnostics.timeline.merge import merge

    with errors("timeline"), progress_console(as_json).status("merging the ranks' files"):
        merged = merge(folder, run, against)
        written, missing = merged.write(out or folder, png)
    if as_json:
        typer.echo(json.dumps(_plain(merged, written), indent=2))
    else:
        _show(merged, written, missing)
    if open_:
        webbrowser.open(written[1].resolve().as_uri())


def _plain(merged: MergedTimeline, written: Sequence[Path]) -> dict[str, object]:
    return {
        "about": merged.about,
        "layers": [row.as_dict() for row in merged.rows()],
        "clocks": [asdict(shift) for shift in merged.shifts],
        "notes": merged.notes,
        "written": [str(path) for path in written],
    }


def _show(merged: MergedTimeline, written: Sequence[Path], missing: Sequence[str]) -> None:
    from ascend_parallel.diagnostics.timeline.merge import clock, columns

    out, rows = console(), merged.rows()
    out.print(_table(merged.about, rows))
    for name, _, _, meaning in columns(rows):
        out.print(f"{name}: {meaning}", markup=False, highlight=False, soft_wrap=True)
    out.print()
    for shift in merged.shifts:
        out.print(f"clock of {clock(shift)}", markup=False, highlight=False, soft_wrap=True)
    for note in [*merged.notes, *missing]:
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for path in written:
        out.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, rows: Sequence[Row]) -> FittedTable:
    from ascend_parallel.diagnostics.timeline.merge import cell, columns

    silent = sum(not row.comm and row.comm is not None for row in rows)
    others = f"; {silent} passes without communication are in the report" if silent else ""
    figures = columns(rows)
    cells = [
        (row.layer, row.direction, row.kernel, *(cell(value(row), form) for _, value, form, _ in figures))
        for row in rows
        if row.comm != 0
    ]
    heads = ("layer", "pass", "chunks", *(name for name, *_ in figures))
    return terminal_table(f"{title}: medians in ms{others}", heads, cells, right=range(3, len(heads)))
