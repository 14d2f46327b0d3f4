"""Compare published trainings with predictions, by source; needs no device.

    python benchmarks/published_trainings.py                                            print tables
    python benchmarks/published_trainings.py --json                                     the same values; seconds, bytes
    python benchmarks/published_trainings.py --write docs/predicted-and-published.md    write the page's tables

The rows are in published/data/runs.toml, each with its source. The page has two more: what the evaluation behind
plan-training says of the rows, and the search beside launch scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from published.degrees import evaluate_run, launch_page, launched_runs, planning_obstacle
from published.report import HEADS, cells_of, compare_runs, show_runs, summary_table

from ascend_parallel.cli.output import console, progress_console
from ascend_parallel.text.tables import markdown_table

WIDTH = 150
PREDICT, PLANNED = "<!-- predict: below -->\n", "<!-- plan-training: below -->\n"
LAUNCHES = "<!-- launch scripts: below -->\n"


def main(
    write: Annotated[Path | None, typer.Option(help="Write the tables below the marks of this page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Compare published trainings with predictions, by source."""
    with progress_console(as_json).status("predicting"):
        comparison = compare_runs()
        if write is not None:
            parts = {PREDICT: page(comparison), PLANNED: planned(), LAUNCHES: launch_page(launched_runs())}
            document = write.read_text(encoding="utf-8")
            for mark, text in parts.items():
                document = inserted(document, mark, text)
            write.write_text(document, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
    elif write is None:
        show_runs(comparison, console(WIDTH))


def planned() -> str:
    """Return the tables of the evaluation behind plan-training."""
    return page(compare_runs(planning_obstacle, evaluate_run))


def page(comparison: Mapping[str, Any]) -> str:
    """Return the tables of a comparison in Markdown."""
    parts = [*markdown_table(*summary_table(comparison["summary"])), ""]
    for table in dict.fromkeys(row["table"] for row in comparison["rows"]):
        rows = [row for row in comparison["rows"] if row["table"] == table]
        cells = [cells_of(row) for row in rows if row["error"] is not None]
        parts += [f"### {table}", "", rows[0]["source"], ""]
        parts += [*markdown_table(HEADS, cells), ""] if cells else []
        left_out = [f"`{row['id']}`: {row['obstacle']}" for row in rows if row["error"] is None]
        parts += ["Not predicted: " + "; ".join(left_out) + ".", ""] if left_out else []
    return "\n".join(parts)


def inserted(document: str, mark: str, text: str) -> str:
    """Return the document with `text` below its mark, up to the next heading of level 2.

    Raises `ValueError` if the mark is missing.
    """
    before, found, after = document.partition(mark)
    if not found:
        raise ValueError(f"the document has no mark {mark.strip()}")
    rest = after.partition("\n## ")
    return f"{before}{mark}\n{text}" + "".join(rest[1:])


if __name__ == "__main__":
    typer.run(main)
