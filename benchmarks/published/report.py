"""Published runs beside predictions: as plain values, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console

from ascend_parallel.text.tables import terminal_table
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from published.prediction import RunPrediction, measured_seconds, obstacle, predict_run
from published.runs import PublishedRun, all_runs

WITHIN = 0.2
HEADS = ("run", "cards", "tp pp cp dp", "published s", "predicted s", "error", "memory GB", "fits", "pitfall")
LEGEND = """\
Seconds of a training step; a published speed is converted by the row's batch. error: predicted / published speed - 1;
+10 % means predicted 10 % too fast. memory: predicted for the fullest card. Nothing was fitted to a row; the sources of
the model's numbers are printed by `ascend-parallel predict --sources`."""


def compare_runs(
    why_not: Callable[[PublishedRun], str] = obstacle,
    predict: Callable[[PublishedRun], RunPrediction] = predict_run,
    runs: Sequence[PublishedRun] | None = None,
) -> dict[str, Any]:
    """Return every published row with its prediction, and the errors by source.

    why_not, predict: why a row cannot be predicted ("": it can), and its prediction; by default those of `predict`.
    runs: the rows; None: those of runs.toml.
    """
    rows = [_row(run, why_not(run), predict) for run in (all_runs() if runs is None else runs)]
    predicted = [row for row in rows if row["error"] is not None]
    tables = list(dict.fromkeys(row["table"] for row in predicted))
    summary = [_errors(table, [row for row in predicted if row["table"] == table]) for table in tables]
    return {"rows": rows, "summary": [*summary, _errors("all", predicted)]}


def show_runs(comparison: Mapping[str, Any], console: Console) -> None:
    """Print a comparison of `compare_runs`."""
    for table in dict.fromkeys(row["table"] for row in comparison["rows"]):
        rows = [row for row in comparison["rows"] if row["table"] == table]
        predicted = [cells_of(row) for row in rows if row["error"] is not None]
        console.print(terminal_table(table, HEADS, predicted, right=range(1, len(HEADS) - 1)))
        for row in rows:
            if row["error"] is None:
                console.print(f"  {row['id']}: not predicted: {row['obstacle']}", markup=False, highlight=False)
    heads, sources = summary_table(comparison["summary"])
    console.print(terminal_table("errors by source", heads, sources, right=range(1, len(heads) - 1)))
    console.print(LEGEND, markup=False, highlight=False)


def _row(run: PublishedRun, words: str, predict: Callable[[PublishedRun], RunPrediction]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "id": run.id,
        "table": run.table,
        "source": f"{run.source}{f', {run.commit}' if run.commit else ''}",
        "devices": run.devices,
        "degrees": [run.tp, run.pp, run.cp, run.dp],
        "metric": run.metric,
        "value": run.value or run.value_text,
        "pitfall": run.pitfall if run.verified else f"not verified; {run.pitfall}",
        "obstacle": words,
    }
    if words:
        return result | {"published": None, "predicted": None, "error": None, "memory": None, "fits": None}
    published, predicted = measured_seconds(run), predict(run)
    seconds = predicted.seconds
    return result | {
        "published": published,
        "predicted": seconds,
        "error": published / seconds - 1,
        "memory": predicted.memory,
        "fits": predicted.memory <= find_hardware(run.chip or "").memory.capacity,
    }


def _errors(table: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sizes = [abs(row["error"]) for row in rows]
    return {
        "table": table,
        "rows": len(rows),
        "median_speed": 1 + median(row["error"] for row in rows),
        "median_error": median(sizes),
        "within": sum(size <= WITHIN for size in sizes) / len(sizes),
        "worst": max(sizes),
    }


def goals_in_words(by_predict: Mapping[str, Any], by_planning: Mapping[str, Any]) -> str:
    """Return the median errors of both predictions, and the share of rows within the goal, in words."""

    def words(comparison: Mapping[str, Any]) -> str:
        last = comparison["summary"][-1]
        return f"{100 * last['median_error']:.1f} % and {100 * last['within']:.0f} % of {last['rows']} rows"

    return f"`predict` {words(by_predict)}, `plan-training` {words(by_planning)}"


def summary_table(summary: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the heads and the rows of the table of errors by source."""
    heads = ("source", "rows", "median speed", "median error", f"within {WITHIN:.0%}", "worst")
    return heads, [
        (
            each["table"],
            str(each["rows"]),
            f"{each['median_speed']:.2f}",
            f"{each['median_error']:.1%}",
            f"{each['within']:.0%}",
            f"{each['worst']:.0%}",
        )
        for each in summary
    ]


def cells_of(row: Mapping[str, Any]) -> Sequence[str]:
    """Return a run's row of the table with the heads `HEADS`."""
    return (
        row["id"],
        str(row["devices"]),
        " ".join(map(str, row["degrees"])),
        f"{row['published']:.4g}",
        f"{row['predicted']:.4g}",
        f"{row['error']:+.1%}",
        f"{row['memory'] / 1e9:.1f}",
        "yes" if row["fits"] else "no",
        row["pitfall"],
    )
