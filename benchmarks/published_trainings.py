"""Compare published trainings with predictions, by source; needs no device.

    python benchmarks/published_trainings.py                                            print tables
    python benchmarks/published_trainings.py --json                                     the same values; seconds, bytes
    python benchmarks/published_trainings.py --write docs/predicted-and-published.md    write the page's tables
    python benchmarks/published_trainings.py --rows kept_aside.toml --medians           rows that are kept elsewhere

The rows are in published/data/runs.toml, each with its source. The page has two more: what the evaluation behind
plan-training says of the rows, and the search beside launch scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from published.degrees import evaluate_run, launch_page, launched_runs, planning_obstacle
from published.report import HEADS, cells_of, compare_runs, goals_in_words, show_runs, summary_table
from published.runs import PublishedRun, all_runs

from ascend_parallel.cli.output import console, progress_console
from ascend_parallel.text.tables import markdown_table

WIDTH = 150
PREDICT, PLANNED = "<!-- predict: below -->\n", "<!-- plan-training: below -->\n"
GOALS = "<!-- errors -->", "<!-- end of errors -->"
LAUNCHES = "<!-- launch scripts: below -->\n"


def main(
    write: Annotated[Path | None, typer.Option(help="Write the tables below the marks of this page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    rows: Annotated[Path | None, typer.Option(help="TOML file of other rows, in the form of runs.toml.")] = None,
    medians: Annotated[bool, typer.Option(help="Print the medians of predict and plan-training alone.")] = False,
) -> None:
    """Compare published trainings with predictions, by source."""
    if write is not None and (rows is not None or medians):
        raise typer.BadParameter(
            "the page has the rows of runs.toml: leave out --rows and --medians", param_hint="--write"
        )
    with progress_console(as_json).status("predicting"):
        runs = all_runs() if rows is None else all_runs(rows)
        comparison = compare_runs(runs=runs)
        if medians:
            typer.echo(goals_in_words(comparison, compare_planned(runs)))
            return
        if write is not None:
            by_planning = compare_planned(runs)
            parts = {PREDICT: page(comparison), PLANNED: page(by_planning), LAUNCHES: launch_page(launched_runs())}
            document = between(write.read_text(encoding="utf-8"), GOALS, goals_in_words(comparison, by_planning))
            for mark, text in parts.items():
                document = inserted(document, mark, text)
            write.write_text(document, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
    elif write is None:
        show_runs(comparison, console(WIDTH))


def compare_planned(runs: Sequence[PublishedRun] | None = None) -> dict[str, Any]:
    """Return what `compare_runs` returns, by the evaluation behind plan-training."""
    return compare_runs(planning_obstacle, evaluate_run, runs)


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


def between(document: str, marks: tuple[str, str], text: str) -> str:
    """Return the document with `text` between two marks; raises `ValueError` if one is missing."""
    before, first, after = document.partition(marks[0])
    _, last, rest = after.partition(marks[1])
    if not first or not last:
        raise ValueError(f"the document has no marks {' '.join(marks)}")
    return before + first + text + last + rest


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
