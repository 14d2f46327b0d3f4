"""Print the published gains beside the predictions as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console

from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.text.tables import FittedTable, terminal_table
from published.gains import SCHEDULES, percent

WIDEST = {"value": 46}
LEGEND = """\
published: gains of fused operators, end to end. The other columns are predictions of whole training steps: N equal
chunks, the best equal chunks, the best chunks, and lower bounds of the time. "bound, fused" leaves the column layer's
backward as Megatron-core runs it, so "best", which has chunks there, can be above it. All are predictions of a cost
model. None was fitted to the published gains."""


def show_published(comparison: Mapping[str, Any], console: Console) -> None:
    """Print a comparison of `gains.compare`."""
    console.print(f"published by {comparison['source']}", markup=False, highlight=False)
    console.print(_gains(comparison))
    console.print(LEGEND, markup=False, highlight=False)
    console.print(_chunks(comparison))
    console.print(_grid(comparison))
    console.print(_causes(comparison))
    rows = [[row["name"], row["value"], row["source"]] for row in comparison["assumptions"]]
    console.print(terminal_table("assumptions", ["what", "value", "source"], rows, widest=WIDEST))
    console.print("What remains unexplained:", markup=False, highlight=False)
    for model, case in _cases(comparison):
        console.print(f"- {model['model']}, {case['mode']}: {case['unexplained']}", markup=False, highlight=False)
    console.print("Not in the model:", markup=False, highlight=False)
    for words in comparison["left_out"]:
        console.print(f"- {words}", markup=False, highlight=False)


def _gains(comparison: Mapping[str, Any]) -> FittedTable:
    rows = []
    for model, case in _cases(comparison):
        gains = [percent(case["gains"][name]) for name in SCHEDULES]
        sizes = [str(case["sequence"]), str(case["micro_batch"])]
        rows.append([model["model"], case["mode"], *sizes, percent(model["published"]), *gains])
    heads = ["model", "mode", "sequence", "batch", "published", *SCHEDULES]
    numbers = range(2, len(heads))
    return terminal_table("gain of a training step, published and predicted", heads, rows, right=numbers)


def _chunks(comparison: Mapping[str, Any]) -> FittedTable:
    rows, heads = [], ["model", "mode"]
    for model, case in _cases(comparison):
        heads[2:] = case["chunks"]
        counts = [f"{ways[FORWARD] or '-'} / {ways[BACKWARD] or '-'}" for ways in case["chunks"].values()]
        rows.append([model["model"], case["mode"], *counts])
    title = 'chunks of "best" by layer, forward / backward; -: no collective'
    return terminal_table(title, heads, rows, right=range(2, len(heads)))


def _grid(comparison: Mapping[str, Any]) -> FittedTable:
    rows, heads = [], ["model", "mode", "batch"]
    for model, case in _cases(comparison):
        for micro_batch, points in groupby(case["grid"], key=lambda point: point["micro_batch"]):
            found = list(points)
            heads[3:] = [str(point["sequence"]) for point in found]
            rows.append([model["model"], case["mode"], str(micro_batch), *map(_ends, found)])
    return terminal_table('"best" / "bound, fused" by sequence', heads, rows, right=range(2, len(heads)))


def _causes(comparison: Mapping[str, Any]) -> FittedTable:
    rows, heads = [], ["model", "mode", "as assumed"]
    for model, case in _cases(comparison):
        heads[3:] = case["causes"]
        cells = [_ends(gains) for gains in (case["gains"], *case["causes"].values())]
        rows.append([model["model"], case["mode"], *cells])
    title = 'candidate causes: "best" / "bound, fused" if the runs differed'
    return terminal_table(title, heads, rows, right=range(2, len(heads)))


def _cases(comparison: Mapping[str, Any]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every model with each of its modes, by mode."""
    cases = [(model, case) for model in comparison["models"] for case in model["cases"]]
    return sorted(cases, key=lambda pair: pair[1]["mode"])


def _ends(gains: Mapping[str, float]) -> str:
    return f"{percent(gains['best'])} / {percent(gains['bound, fused'])}"
