"""``ascend-parallel doctor``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from ascend_parallel.cli.options import DeviceOption
from ascend_parallel.cli.output import console, errors, progress_console

if TYPE_CHECKING:
    from ascend_parallel.diagnostics.doctor import ContextRequest, Report

MARKS = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


def doctor(
    group: int | None = typer.Option(
        None, metavar="RANKS", min=2, max=16, help="Try every kernel on this number of local processes."
    ),
    device: DeviceOption = None,
    context: str | None = typer.Option(
        None, metavar="HEADS,KEYS,RANKS", help="Say how ranks that share a sequence would exchange these heads."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, for scripts."),
) -> None:
    """Report what is installed, enabled and available on this machine, and what to fix.

    Exits with 1 if something is wrong, otherwise with 0. --json also has every call of --group: its error against
    float64, whether it has the serial path's bits, and whether a second call had the same.

    Examples:

      ascend-parallel doctor

      COC_PARALLEL_NUM=4 ascend-parallel doctor --group 2

      COC_PARALLEL_NUM=4 ascend-parallel doctor --context 32,8,4
    """
    from ascend_parallel.cli.bench_request import requested_device
    from ascend_parallel.diagnostics.doctor import examine
    from ascend_parallel.patch_control import CONTROL

    if os.environ.get("RANK", "0") != "0":
        return
    with errors("doctor"):
        place = requested_device(device, group or 1, None)
    shared = None if context is None else _heads(context)
    with progress_console(as_json).status("examining") as line:
        report = examine(CONTROL, group or 0, lambda step: line.update(f"examining {step}"), place, context=shared)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report.healthy else 1)


def _heads(text: str) -> ContextRequest:
    """Read ``HEADS,KEYS,RANKS``."""
    from ascend_parallel.diagnostics.doctor import ContextRequest
    from ascend_parallel.text import parse_int, shown

    counts = [parse_int(part) or 0 for part in text.split(",")]
    if len(counts) != 3 or min(counts) < 1:
        raise typer.BadParameter(
            f"{shown(text)} is not allowed: give HEADS,KEYS,RANKS such as 32,8,4", param_hint="--context"
        )
    queries, keys, ranks = counts
    return ContextRequest(queries=queries, keys=keys, ranks=ranks)


def _print(report: Report) -> None:
    out = console()
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    section = ""
    for finding in report.findings:
        if finding.section != section:
            section = finding.section
            table.add_row("", f"[bold]{section}[/]", "", "")
        table.add_row(MARKS[finding.verdict], finding.name, finding.found, finding.advice)
    out.print(table)
    out.print(f"\n{report.verdict}", style="bold", soft_wrap=True)
