"""What the demo prints: losses, step times, a small timeline, and the gain predicted for a cluster."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile
from ascend_parallel.diagnostics.timeline.table import busy, communicating
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.cost_model.models import Batch, find_model
from ascend_parallel.tuning.cost_model.report import predict
from ascend_parallel.tuning.cost_model.step import Layout

VARIABLE = "COC_PARALLEL_NUM"
LAYER = "linear_fc2"  # of which a pass is drawn
# Why no run on the loopback is to be expected to gain.
LOOPBACK = (
    "On one host the link is as fast as memory and the ranks share its cores: there is next to nothing to hide, and "
    "chunks cost. Overlap gains where moving rows takes about as long as the matmuls."
)

Report = dict[str, Any]
Verdict = dict[str, Any]


def show(
    console: Console, plain: Report, runs: dict[str, Report], verdicts: dict[str, Verdict], link: str | None
) -> None:
    """Print the tables and what they mean."""
    titles = ["as it is", *map(_named, runs)]
    reports = [plain, *runs.values()]
    console.print(_loss_table(titles, reports, verdicts))
    console.print(_summary_table(titles, reports))
    for patch in next(iter(runs.values()))["status"]["patches"]:
        if not patch["target"].startswith("megatron."):
            continue
        state = "replaced" if patch["applied"] else "not replaced"
        reason = f" ({patch['reason']})" if patch.get("reason") else ""
        console.print(f"{state}: {patch['target']}{reason}", markup=False, highlight=False, soft_wrap=True)
    for line in dict.fromkeys(line for run in runs.values() for line in run["said"] if f"{VARIABLE}=auto: " in line):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for value, verdict in verdicts.items():
        console.print(_last_word(value, len(plain["weights"]), verdict), soft_wrap=True)
    console.print(about_time(verdicts, link), highlight=False, soft_wrap=True)


def _last_word(value: str, ranks: int, verdict: Verdict) -> str:
    if not verdict["patched"]:
        return (
            f"[red]Nothing was patched[/] by the variable alone: {VARIABLE}={value} needs the entry point that torch "
            f"loads. Is ascend_parallel installed in {sys.prefix}? Ask: ascend-parallel doctor"
        )
    if verdict["equal"]:
        return f"[green]Equal[/]: with {VARIABLE}={value} every loss and every weight is the same, bit for bit."
    if not verdict["differing_steps"]:
        return f"[red]Different[/]: with {VARIABLE}={value} the weights after the last step are, the losses are not."
    step, gap = verdict["differing_steps"][0], verdict["largest_gap"]
    text = f"[red]Different[/]: with {VARIABLE}={value} losses part at step {step}; the largest gap is {gap:.1e}."
    if ranks > 2:
        text += " More than 2 ranks add up in an order that depends on the place in gloo's buffer, chunks on another."
    return text


def about_time(verdicts: dict[str, Verdict], link: str | None) -> str:
    """Say how long the steps took, how many times as fast that is, and over which link."""
    plain = next(iter(verdicts.values()))["median_milliseconds"][0]
    steps = ", ".join(
        f"{time:.1f} ms with {_named(value)} ({plain / time:.2f} times as fast)"
        for value, (_, time) in ((value, verdict["median_milliseconds"]) for value, verdict in verdicts.items())
    )
    where = f"Over a link of {link}" if link else "On the loopback"
    text = f"{where} a step took {plain:.1f} ms as it is, {steps}, each run by itself."
    return text if link else f"{text} {LOOPBACK}"


def _named(value: str) -> str:
    return value if value == "auto" else f"{value} chunks"


def _loss_table(titles: list[str], reports: list[Report], verdicts: dict[str, Verdict]) -> Table:
    table = Table(title=f"Loss of each step, by {VARIABLE}")
    for column in ("step", *titles, "same bits"):
        table.add_column(column, justify="right")
    differing = {step for verdict in verdicts.values() for step in verdict["differing_steps"]}
    for step, losses in enumerate(zip(*(report["losses"] for report in reports), strict=True)):
        shown = (f"{float.fromhex(loss):.7f}" for loss in losses)
        table.add_row(str(step), *shown, "[red]no[/]" if step in differing else "yes")
    return table


def _summary_table(titles: list[str], reports: list[Report]) -> Table:
    table = Table(title=f"What ran, by {VARIABLE}")
    for column in ("", *titles):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("median step", *(f"{statistics.median(report['milliseconds']):.1f} ms" for report in reports))
    table.add_row("half of the steps took", *(_middle_half(report["milliseconds"]) for report in reports))
    table.add_row("linear layers covered", *(_covered(report["coverage"]) for report in reports))
    counts = [(report["status"] or {"counts": {}})["counts"] for report in reports]  # as it is: nothing is imported
    for operator in sorted({name for count in counts for name in count}):
        table.add_row(operator, *(_describe(count.get(operator)) for count in counts))
    return table


def _covered(coverage: dict[str, int] | None) -> str:
    return f"{coverage['covered']} of {coverage['total']}" if coverage else "-"


def _middle_half(milliseconds: list[float]) -> str:
    """Tell how far steps lie apart: what other programs do to the machine, and to one run more than to another."""
    if len(milliseconds) < 2:
        return "-"
    low, _, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return f"{low:.0f} to {high:.0f} ms"


def _describe(count: dict[str, int] | None) -> str:
    if not count or not count["calls"]:
        return "-"
    return f"{count['calls']} calls, {count['chunks']} chunks, {count['collectives']} collectives"


def sketch(passes: dict[str, Pass], width: int = 60) -> list[str]:
    """Draw a pass of each run on one scale: a lane for when the rank computed, and one for when the link was busy."""
    longest = max(one.end - one.begin for one in passes.values())
    titles = [f"{title}: {(one.end - one.begin) / 1e6:.1f} ms" for title, one in passes.items()]
    lines = []
    for title, one in zip(titles, passes.values(), strict=True):
        lines.append(title)
        for name, intervals, mark in (("matmul", busy(one), "#"), ("link", communicating(one), "=")):
            lane = [" "] * width
            for begin, end in intervals:
                first, last = ((point - one.begin) * width / longest for point in (begin, end))
                for column in range(int(first), min(width, max(int(first) + 1, round(last)))):
                    lane[column] = mark
            lines.append(f"  {name:6} |{''.join(lane)}|")
    return lines


def typical_pass(files: Sequence[RankFile]) -> Pass:
    """Return the pass of median length of the MLP's second layer, forward, on rank 0."""
    found = [one for one in files[0].passes if one.finished and one.direction == "forward" and LAYER in one.title]
    return sorted(found, key=lambda one: one.end - one.begin)[len(found) // 2]


def predicted_gain() -> str:
    """Say what the cost model foresees for a large model on a named cluster."""
    model, hardware = find_model("llama2-70b"), find_hardware("910b")
    batch = Batch(sequence=4096, micro_batch=1, tp=8, sequence_parallel=True, dtype=torch.bfloat16, device="npu")
    step = predict(model, batch, Layout(micro_batches=8), hardware)["step"]
    serial, best = (step[name]["total"] for name in ("serial", "best"))
    return (
        f"Predicted, not measured: {model.title} on 8 x {hardware.title}, a step of {serial * 1e3:.0f} ms serial, "
        f"{best * 1e3:.0f} ms overlapped ({serial / best:.2f} times as fast). "
        "Details: ascend-parallel predict --model llama2-70b --tp 8 --hardware 910b"
    )
