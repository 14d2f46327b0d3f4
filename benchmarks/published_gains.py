"""Compare the gains of overlap that MindSpeed publishes with predictions of the same training steps; needs no device.

    python benchmarks/published_gains.py                             print tables
    python benchmarks/published_gains.py --seq 8192 --no-sequence-parallel --hardware 910b3
    python benchmarks/published_gains.py --json                      the same values; gains are shares
    python benchmarks/published_gains.py --write docs/predict.md     write the page's tables, and its Chinese twin's

No number of the model was changed to fit these gains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from published.gains import (
    FUSED_BOUND,
    MODES,
    PUBLISHED,
    PUBLISHED_TP,
    compare,
    percent,
    step_gain,
    with_fixed_cost,
)
from published.gains_report import show_published

from ascend_parallel.cli import predict
from ascend_parallel.cli.options import SequenceOption, dtype_of
from ascend_parallel.cli.output import console, errors, progress_console
from ascend_parallel.ops.call import ALL_REDUCE, Matmul
from ascend_parallel.text.tables import markdown_table
from ascend_parallel.tuning.cost_model.assumptions import Assumptions
from ascend_parallel.tuning.cost_model.chunk_pipeline import makespan
from ascend_parallel.tuning.cost_model.chunk_search import best_sizes, equal_sizes
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware, find_hardware
from ascend_parallel.tuning.cost_model.layer_passes import BEST, ChunkSchedule
from ascend_parallel.tuning.cost_model.models import find_model
from ascend_parallel.tuning.cost_model.step import Layout
from ascend_parallel.tuning.step_time.runtimes import MEGATRON

BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"
# Assumed: the publication does not name the chip.
HARDWARE = "ascend-910b2"
WIDTH = 150
# Matmul-all-reduce [5416, 6144, 1408] fp16 on 8 x 910B1 (PTO-ISA, kernels/manual/a2a3/gemm_ar), microseconds,
# as published on 27 April 2026. An older page had 743 in turn (365 + 375) and 631 overlapped.
OPERATOR = (5416, 6144, 1408)
OPERATOR_MEASURED = {"in turn": 808.9, "overlapped": 560.6}
# Square fp16 matmuls on one 910B2 (github.com/zzc0721/torch-performance-test-data, issue 109), TFLOPS.
SQUARES = {1024: 98.08, 2048: 251.01, 4096: 314.52, 8192: 305.46, 10240: 274.76}
EXTRA_FIXED = (0, 50, 200, 460)
LAUNCHES = (0, 20, 50, 100)
CHINESE = {
    "Sensitivity to fixed costs": "对固定耗时的敏感度",
    "Sensitivity to the chip": "对芯片的敏感度",
    "Pieces that can be checked against measurements": "可以与实测核对的部分",
    "Beside the published gains": "与公开的收益对照",
    " us a collective": " us，每次集合通信",
    " us a launch": " us，每次下发",
    ", 4 equal": "，4 等分",
    ", best, sequence": "，最好，序列并行",
    ", best": "，最好",
    ", bound, fused": "，下界，融合",
    "bound, fused": "下界，融合",
    "square fp16 matmul, 910B2": "fp16 方阵的矩阵乘，910B2",
    "TFLOPS measured": "TFLOPS，实测",
    "off by": "相差",
    "us measured (fused kernel)": "us，实测（融合算子）",
    "us predicted": "us，预测",
    "predicted": "预测",
    "matmul-all-reduce [5416, 6144, 1408], 8 x 910B1": "矩阵乘加 all-reduce [5416, 6144, 1408]，8 x 910B1",
    "matmul": "矩阵乘",
    "collective": "集合通信",
    "in turn": "依次",
    "overlapped": "掩盖",
    "4 equal chunks": "4 等分",
    "bound": "下界",
    "published outside of the grid by": "公开的收益超出这组取值",
    "published": "公开",
    "the same on a 910B3": "在 910B3 上",
    " points": " 个百分点",
}


def main(
    hardware: predict.HardwareName = HARDWARE,
    link: predict.LinkRate = None,
    tp: predict.TensorRanks = PUBLISHED_TP,
    dp: predict.Replicas = 1,
    pp: predict.Stages = 1,
    seq: SequenceOption = None,
    micro_batch: predict.MicroBatch = None,
    micro_batches: predict.MicroBatches = None,
    sequence_parallel: predict.SequenceParallel = None,
    runtime: predict.RuntimeName = MEGATRON.name,
    recompute: predict.RecomputeKind = "none",
    dtype: predict.Dtype = None,
    launch_us: predict.LaunchTime = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the tables between the marks of this page and its .zh.md.")
    ] = None,
    as_json: predict.AsJson = False,
) -> None:
    """Compare the gains of overlap that MindSpeed publishes with predictions of the same training steps.

    Options replace the assumptions; a sequence, a micro-batch or a mode that is not given is varied.
    """
    if write is not None:
        made = tables()
        for page, text in ((write, made), (write.with_suffix(".zh.md"), chinese(made))):
            page.write_text(inserted(page.read_text(encoding="utf-8"), text), encoding="utf-8")
        return
    with errors("published_gains", ArithmeticError):
        machine = predict.hardware_of(hardware, None, link, launch_us)
        layout = Layout(
            dp=dp,
            pp=pp,
            micro_batches=micro_batches or 8 * pp,
            recompute=recompute,
            runtime=predict.runtime_of(runtime or MEGATRON.name),
        )
        work = Assumptions(
            hardware=machine,
            layout=layout,
            dtype=dtype_of(dtype or machine.dtype),
            tp=tp,
            sequence=seq,
            micro_batch=micro_batch,
        )
        with progress_console(as_json).status("predicting"):
            found = compare(work, tuple(MODES) if sequence_parallel is None else (sequence_parallel,))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show_published(found, console(WIDTH))


def inserted(document: str, text: str) -> str:
    """Return the document with `text` between its marks; raises `ValueError` if the marks are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def chinese(text: str) -> str:
    """Return the tables with their words in Chinese; figures and names of models stay."""
    longest_first = sorted(CHINESE, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: CHINESE[found[0]], text)


def tables() -> str:
    """Return all tables as Markdown."""
    parts = [
        ("### Sensitivity to fixed costs", _fixed_costs()),
        ("### Sensitivity to the chip", _chips()),
        ("### Pieces that can be checked against measurements", _squares()),
        ("", _operator()),
        ("### Beside the published gains", _beside()),
    ]
    return "".join(f"\n{title}\n\n{table}" if title else f"\n{table}" for title, table in parts) + "\n"


@cache
def model_gain(model: str, hardware: Hardware, sequence_parallel: bool, schedule: ChunkSchedule) -> float:
    """Return the predicted gain of a training step over Megatron-core's schedule."""
    layout = Layout(micro_batches=8)
    work = Assumptions(
        hardware=hardware,
        layout=layout,
        dtype=torch.bfloat16,
        tp=PUBLISHED_TP,
        sequence_parallel=sequence_parallel,
    )
    return step_gain(_costs(hardware), find_model(model), work.batch(find_model(model)), layout, schedule)


@cache
def _costs(hardware: Hardware) -> CostModel:
    return CostModel(hardware)


def _fixed_costs() -> str:
    base = find_hardware(HARDWARE)
    variants = {f"+{extra} us a collective": with_fixed_cost(base, extra * 1e-6) for extra in EXTRA_FIXED}
    variants |= {f"{launch} us a launch": base.with_launch(launch * 1e-6) for launch in LAUNCHES}
    rows = []
    for words, hardware in variants.items():
        gains = [
            percent(model_gain(name, hardware, sequence_parallel, schedule))
            for name in PUBLISHED
            for sequence_parallel, schedule in ((False, ChunkSchedule(name="=4")), (False, BEST), (True, BEST))
        ]
        rows.append([words, *gains])
    heads = [f"{name}, {what}" for name in PUBLISHED for what in ("4 equal", "best", "best, sequence")]
    return _table(["", *heads], rows)


def _chips() -> str:
    rows = []
    for chip in ("ascend-910b1", "ascend-910b2", "ascend-910b3", "ascend-910b4"):
        gains = [
            percent(model_gain(name, find_hardware(chip), False, schedule))
            for name in PUBLISHED
            for schedule in (BEST, FUSED_BOUND)
        ]
        rows.append([chip, *gains])
    heads = [f"{name}, {what}" for name in PUBLISHED for what in ("best", "bound, fused")]
    return _table(["all-reduce", *heads], rows)


def _beside() -> str:
    """Return the bounds in all-reduce mode, and how far a gain is outside of the grid."""
    layout, base = Layout(micro_batches=8), find_hardware(HARDWARE)
    found = compare(Assumptions(hardware=base, layout=layout, dtype=torch.bfloat16, tp=PUBLISHED_TP), (False,))
    rows = []
    for model in found["models"]:
        (case,) = model["cases"]
        least, most = case["range"]
        outside = max(0.0, least - model["published"], model["published"] - most)
        other = model_gain(model["model"], find_hardware("ascend-910b3"), False, FUSED_BOUND)
        gains = model["published"], case["gains"]["bound, fused"], other
        rows.append([model["model"], *map(percent, gains), f"{100 * outside:.2f} points"])
    heads = ["all-reduce", "published", "bound, fused", "the same on a 910B3", "published outside of the grid by"]
    return _table(heads, rows)


def _squares() -> str:
    costs = _costs(find_hardware("ascend-910b2"))
    rows = []
    for size, measured in SQUARES.items():
        predicted = 2 * size**3 / costs.matmul(size, size, size, 2) / 1e12
        rows.append([str(size), f"{measured:.0f}", f"{predicted:.0f}", f"{predicted / measured - 1:+.0%}"])
    return _table(["square fp16 matmul, 910B2", "TFLOPS measured", "predicted", "off by"], rows)


def _operator() -> str:
    costs = _costs(find_hardware("ascend-910b1"))
    problem = Matmul(ALL_REDUCE, *OPERATOR, torch.float16, "npu", PUBLISHED_TP)
    whole = (problem.rows,)

    def seconds(sizes: tuple[int, ...]) -> float:
        return makespan(costs.call(problem, sizes))

    matmul, collective = costs.chunk(problem, problem.rows, True)
    best = best_sizes(problem.rows, seconds)
    predicted = {
        "matmul": matmul,
        "collective": collective,
        "in turn": seconds(whole),
        "overlapped": best.seconds,
        "4 equal chunks": seconds(equal_sizes(problem.rows, 4)),
        "bound": costs.bound(problem),
    }
    rows = [[name, str(OPERATOR_MEASURED.get(name, "")), f"{value * 1e6:.0f}"] for name, value in predicted.items()]
    return _table(
        ["matmul-all-reduce [5416, 6144, 1408], 8 x 910B1", "us measured (fused kernel)", "us predicted"], rows
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"{line}\n" for line in markdown_table(heads, rows))


if __name__ == "__main__":
    typer.run(main)
