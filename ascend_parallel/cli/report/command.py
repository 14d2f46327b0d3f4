"""``ascend-parallel report``: run the sections one after the other, and write the two files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_parallel.cli.options import DeviceOption
from ascend_parallel.cli.output import errors, needs_folder, progress_console
from ascend_parallel.cli.report.page import markdown
from ascend_parallel.cli.report.redaction import Redaction
from ascend_parallel.text import parse_int
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup
from ascend_parallel.tuning.launch.devices import CPU
from ascend_parallel.version import __version__

if TYPE_CHECKING:
    from ascend_parallel.cli.report.sections import Request

SCHEMA = 2
NAME = "ascend_parallel_report"
NAMES = ("doctor", "bench", "try")  # of the sections, in their order
MOST_RANKS = 16


def report(
    launch: Annotated[
        list[str] | None, typer.Argument(help="Your own launch, behind --, to try plain and overlapped.")
    ] = None,
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
    """Measure this machine in ten minutes, and write a report to paste into an issue: Markdown and JSON.

    What doctor finds, with every kernel against float64 and in bits; what bench measures of layers and collectives,
    beside the prediction; what try says of your own launch. The files have no paths, host names, user names or
    addresses. Each section has a time limit; the report has the error of a section that fails. Your own launch takes up
    to half an hour more.

    Examples:

      ascend-parallel report --ranks 2 --quick

      torchrun --nproc-per-node 8 -m ascend_parallel report

      ascend-parallel report -- torchrun --nproc-per-node 8 train.py
    """
    with errors("report"):
        needs_folder("--out", out)
        request = _request(ranks, device, quick, launch or ())
        known = {name: name for name in NAMES}
        names = list(NAMES) if only is None else [lookup("--only", name, known) for name in only.split(",")]
        if os.environ.get("RANK", "0") != "0":
            return  # rank 0 starts ranks of its own for each section
        out.mkdir(exist_ok=True)
        found = _run(request, names, Redaction.of(os.environ), as_json)
        write(found, out)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{out / NAME}.md and .json: paste them into an issue of the kind 'A report'")


def _request(ranks: int | None, device: str | None, quick: bool, launch: Sequence[str]) -> Request:
    from ascend_parallel.cli.bench_request import requested_device
    from ascend_parallel.cli.report.sections import Request

    started = os.environ.get("WORLD_SIZE", "1")
    here = os.environ.get("LOCAL_WORLD_SIZE", started)
    if started != here:
        raise PlanningError(
            f"torchrun has {started} ranks, and {here} here: report measures one machine, give torchrun one node"
        )
    torchrun = parse_int(started) or 1
    if launch and torchrun > 1:
        raise PlanningError("a launch behind -- starts its own ranks: run report without torchrun, with --ranks")
    count = ranks or (torchrun if torchrun > 1 else _devices())
    if count > MOST_RANKS:
        raise PlanningError(f"{count} ranks: report takes 2 to {MOST_RANKS}; give --ranks")
    return Request(ranks=count, device=requested_device(device, count, None), quick=quick, launch=tuple(launch))


def _devices() -> int:
    """Return a rank for each device of this machine, or 2."""
    from ascend_parallel.tuning.launch.devices import device_for

    return next((count for count in (16, 8, 4) if device_for(count) != CPU), 2)


def _run(request: Request, names: list[str], redaction: Redaction, quiet: bool) -> dict[str, Any]:
    """Run the sections and return the report, without names; a line on stderr before and after each section."""
    from ascend_parallel.cli.report.sections import SECTIONS

    console, sections = progress_console(quiet), {}
    for place, name in enumerate(names, 1):
        section = SECTIONS[name]
        console.print(f"{place}/{len(names)} {name}: {section.limit:.0f} s at most", highlight=False)
        results = sections[name] = section.run(request)
        state = "failed, see the report" if "error" in results else results.get("skipped", "done")
        console.print(f"{place}/{len(names)} {name}: {state}, {results['seconds']:.0f} s", highlight=False)
    facts = {"ranks": request.ranks, "device": request.device, "quick": request.quick}
    facts["accelerators"] = 0 if request.device == CPU else request.ranks
    return complete(facts, sections, redaction)


def complete(facts: dict[str, Any], sections: dict[str, dict[str, Any]], redaction: Redaction) -> dict[str, Any]:
    """Return a report without names.

    facts
        "ranks", "device" (in words), "accelerators" (how many devices the ranks ran on), "quick".
    sections
        What was measured, by name, with "seconds"; "error" or "skipped" in place of results. A section that is none of
        `NAMES` has "texts", in Markdown.
    """
    date = datetime.now(timezone.utc).date().isoformat()
    about = {"schema": SCHEMA, "version": __version__, "date": date}
    return {**about, **redaction.everywhere({**facts, "sections": sections})}


def write(report: dict[str, Any], out: Path) -> None:
    """Write the two files of a report to a folder."""
    for suffix, text in (("json", json.dumps(report, indent=1) + "\n"), ("md", markdown(report))):
        (out / f"{NAME}.{suffix}").write_text(text, encoding="utf-8")
