"""``ascend-parallel predict``: predict the gain of overlap in a model's tensor-parallel layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ascend_parallel.cli.output import console, errors
from ascend_parallel.tuning.cost_model.hardware import Hardware, all_hardware, find_hardware, read_hardware
from ascend_parallel.tuning.cost_model.layers import RECOMPUTE
from ascend_parallel.tuning.cost_model.models import Batch, Model, all_models, find_model, read_model
from ascend_parallel.tuning.cost_model.report import predict as predicted
from ascend_parallel.tuning.cost_model.report import show, show_sources
from ascend_parallel.tuning.cost_model.step import Layout
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
WIDTH = 150
MOST_RANKS, MOST_ROWS = 1 << 20, 1 << 30
EXAMPLES = """Predict the gain of overlap for a model, per layer and end to end, from a cost model; needs no device.

Examples:

  ascend-parallel predict --model llama2-70b --tp 8 --hardware 910b --seq 4096 --micro-batch 2

  ascend-parallel predict --model gpt3-175b --tp 8 --pp 16 --dp 78 --micro-batches 64 --hardware 910b1

  ascend-parallel predict --model llama2-7b --tp 2 --hardware cpu-gloo --link 1gbit --seq 1024

  ascend-parallel predict --list

  ascend-parallel predict --hardware 910b --sources
"""


def predict(
    model: Annotated[str | None, typer.Option(help="A preset; --list shows them.")] = None,
    model_file: Annotated[
        Path | None, typer.Option(help="TOML file with layers, hidden, ffn, heads, vocab ...")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="A preset; --list shows them.")] = None,
    hardware_file: Annotated[Path | None, typer.Option(help="TOML file with a hardware's numbers.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate of each rank's link, such as 1gbit; cpu-gloo only.")] = None,
    tp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Tensor-parallel ranks.")] = 8,
    dp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Data-parallel replicas.")] = 1,
    pp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Pipeline stages.")] = 1,
    seq: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Sequence length; default: the model's, or 4096.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Sequences per micro-batch.")] = 1,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Micro-batches per step and replica; default: 8 per stage.")
    ] = None,
    sequence_parallel: Annotated[bool, typer.Option(help="All-gather and reduce-scatter, or all-reduce.")] = True,
    recompute: Annotated[str, typer.Option(help=f"Activation recompute: {', '.join(RECOMPUTE)}.")] = "none",
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; default: the hardware's.")] = None,
    launch_us: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Host microseconds per matmul or collective.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List models and hardware.")] = False,
    sources: Annotated[
        bool, typer.Option("--sources", help="Print every number of the hardware with its source.")
    ] = False,
) -> None:
    """Run the command; the help text is `EXAMPLES`."""
    out = console(WIDTH)
    with errors("predict", ArithmeticError):  # ArithmeticError: from a file's numbers, such as a bandwidth of 0
        if list_all:
            _list(out)
            return
        machine = _hardware(hardware, hardware_file, link, launch_us)
        if sources:
            show_sources(machine, out)
            return
        chosen = _model(model, model_file)
        batch = Batch(
            sequence=seq if seq is not None else chosen.sequence or 4096,
            micro_batch=micro_batch,
            tp=tp,
            sequence_parallel=sequence_parallel,
            dtype=lookup("--dtype", dtype or machine.dtype, DTYPES),
            device=machine.device,
        )
        count = micro_batches if micro_batches is not None else 8 * pp
        layout = Layout(dp=dp, pp=pp, micro_batches=count, recompute=recompute)
        result = predicted(chosen, batch, layout, machine)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show(result, out)


def _hardware(name: str | None, path: Path | None, link: str | None, launch_us: float | None) -> Hardware:
    if (name is None) == (path is None):
        raise PlanningError(f"give either --hardware or --hardware-file. Known: {', '.join(all_hardware())}")
    hardware = read_hardware(path) if path is not None else find_hardware(name or "")
    if link is not None:
        hardware = hardware.with_link(link)
    return hardware if launch_us is None else hardware.with_launch(launch_us * 1e-6)


def _model(name: str | None, path: Path | None) -> Model:
    if (name is None) == (path is None):
        raise PlanningError(f"give either --model or --model-file. Known: {', '.join(all_models())}")
    return read_model(path) if path is not None else find_model(name or "")


def _list(out: Console) -> None:
    out.print("models", style="bold")
    for model in all_models().values():
        out.print(
            f"  {model.name:20} {model.title}, {model.count_parameters() / 1e9:.1f}B", markup=False, highlight=False
        )
    out.print("hardware", style="bold")
    for hardware in all_hardware().values():
        names = ", ".join(hardware.aliases)
        out.print(f"  {hardware.name:20} {hardware.title}; also {names}", markup=False, highlight=False)
