"""``ascend-parallel report``: run the sections one after the other, and write the two files."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_parallel.cli.options import DeviceOption
from ascend_parallel.cli.output import errors, needs_folder, progress_console
from ascend_parallel.cli.report import NAMES
from ascend_parallel.cli.report.page import markdown
from ascend_parallel.cli.report.redaction import Redaction
from ascend_parallel.text import whole
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup
from ascend_parallel.version import __version__

if TYPE_CHECKING:
    from ascend_parallel.cli.report.sections import Request

SCHEMA = 1
NAME = "ascend_parallel_report"
MOST_RANKS = 16
LAST_LINES = 3  # of a rank of a section that failed


def report(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, max=MOST_RANKS, help="Processes to start; default: torchrun's, or one for each device."),
    ] = None,
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute: every section, at sizes of a test.")] = False,
    only: Annotated[str | None, typer.Option(help="Sections with commas: " + ",".join(NAMES))] = None,
    out: Annotated[Path, typer.Option(help="Folder for the two files.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON too, for scripts.")] = False,
) -> None:
    """Measure this machine for ten minutes, and write a report to paste into an issue: Markdown and JSON.

    Versions, links, the operators against float64 and in bits, layers with every kernel and chunk count beside their
    prediction, and steps of a small model. The files have no paths, host names, user names or addresses. Sections run
    in processes of their own, with a time limit; the report has the error of a section that fails.

    Examples:

      ascend-parallel report --ranks 2 --quick

      torchrun --nproc-per-node 8 -m ascend_parallel report
    """
    with errors("report"):
        needs_folder("--out", out)
        request = _request(ranks, device, quick)
        known = {name: name for name in NAMES}
        names = list(NAMES) if only is None else [lookup("--only", name, known) for name in only.split(",")]
        if os.environ.get("RANK", "0") != "0":
            return  # rank 0 starts ranks of its own for each section
        out.mkdir(exist_ok=True)
        found = _run(request, names, Redaction.of(os.environ), as_json)
        for suffix, text in (("json", json.dumps(found, indent=1) + "\n"), ("md", markdown(found))):
            (out / f"{NAME}.{suffix}").write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{out / NAME}.md and .json: paste them into an issue of the kind 'A report'")


def _request(ranks: int | None, device: str | None, quick: bool) -> Request:
    from ascend_parallel.cli.bench_request import requested_device
    from ascend_parallel.cli.report.sections import Request

    started = os.environ.get("WORLD_SIZE", "1")
    here = os.environ.get("LOCAL_WORLD_SIZE", started)
    if started != here:
        raise PlanningError(
            f"torchrun has {started} ranks, and {here} here: report measures one machine, give torchrun one node"
        )
    torchrun = whole(started) or 1
    count = ranks or (torchrun if torchrun > 1 else _devices())
    if count > MOST_RANKS:
        raise PlanningError(f"{count} ranks: report takes 2 to {MOST_RANKS}; give --ranks")
    return Request(ranks=count, device=requested_device(device, count, None), quick=quick)


def _devices() -> int:
    """Return a rank for each device of this machine, or 2."""
    from ascend_parallel.tuning.launch.devices import CPU, device_for

    return next((count for count in (16, 8, 4) if device_for(count) != CPU), 2)


def _shortened(error: str) -> str:
    """Return an error with the last lines of what each rank printed, instead of whole tracebacks."""
    first, *ranks = error.split("\n---- ")
    return "\n".join([first, *(f"---- {_ends(text.splitlines())}" for text in ranks)])


def _ends(lines: list[str]) -> str:
    return "\n".join([lines[0], *lines[1:][-LAST_LINES:]])


def _run(request: Request, names: list[str], redaction: Redaction, quiet: bool) -> dict[str, Any]:
    """Run the sections and return the report, without names; a line on stderr before and after each section."""
    from ascend_parallel.cli.report.sections import SECTIONS

    console, sections = progress_console(quiet), {}
    for place, name in enumerate(names, 1):
        section = SECTIONS[name]
        console.print(f"{place}/{len(names)} {name}: {section.limit:.0f} s at most", highlight=False)
        results = section.run(request)
        if "error" in results:
            results["error"] = redaction.error(_shortened(results["error"]))
        state = "failed, see the report" if "error" in results else results.get("skipped", "done")
        console.print(f"{place}/{len(names)} {name}: {state}, {results['seconds']:.0f} s", highlight=False)
        sections[name] = redaction.everywhere(results)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "ranks": request.ranks,
        "device": request.device,
        "quick": request.quick,
        "sections": sections,
    }
