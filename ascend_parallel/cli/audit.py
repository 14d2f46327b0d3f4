"""``ascend-parallel audit``: what a run lost to its collectives, by its profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ascend_parallel.cli.output import console, errors, needs_file, progress_console
from ascend_parallel.text.tables import terminal_table

if TYPE_CHECKING:
    from ascend_parallel.diagnostics.audit.report import Audit


def audit(
    profiles: Annotated[
        list[Path], typer.Argument(help="Traces of torch.profiler, Ascend's profiler or msprof; or folders of them.")
    ],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the lanes of one step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; milliseconds of a step.")] = False,
) -> None:
    """Say from profiles what a run's collectives cost, what hides them, and what this package could hide.

    Reads what torch.profiler exports (JSON or gzip, of GPUs, NPUs and CPUs), the folders of Ascend's profiler, and
    msprof_*.json: one rank's or all. Nothing is run.

    Example: ascend-parallel audit traces/ --html audit.html
    """
    from ascend_parallel.diagnostics.audit.report import audit as audited

    with errors("audit"), progress_console(as_json).status("reading") as status:
        if html is not None:
            needs_file("--html", html)
        result = audited(profiles, status.update)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        _show(result)
    if html is not None:
        html.write_text(result.page(), encoding="utf-8")
        typer.echo(f"written: {html}", err=as_json)


def _show(result: Audit) -> None:
    from ascend_parallel.diagnostics.audit.report import HEADS, LEGEND, cells, roles_in_words

    out = console()

    def say(text: str) -> None:
        out.print(text, markup=False, highlight=False)

    steps = sum(profile.step_count for profile in result.profiles) // len(result.profiles)
    say(f"{len(result.profiles)} of {result.world_size or '?'} ranks, {steps} steps: {result.mean.step:.2f} ms a step")
    for index, rank in enumerate(result.ranks):
        say(f"rank {index if rank.rank is None else rank.rank}: {rank.in_words()}")
    if result.costs:
        rows = [cells(cost) for cost in result.costs]
        out.print(
            terminal_table("collectives of a step, means over the ranks", HEADS, rows, right=range(2, len(HEADS)))
        )
        say(LEGEND)
        for words in roles_in_words(result.costs):
            say(words)
    for sentence in result.features:
        say(f"overlap: {sentence}")
    for note in result.notes:
        say(f"note: {note}")
    say(f"verdict: {result.verdict}")
