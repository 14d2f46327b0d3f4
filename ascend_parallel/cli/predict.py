"""``ascend-parallel predict``: predict the gain of overlap in a model's tensor-parallel layers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ascend_parallel.cli.options import (
    DTYPES,
    MINDFORMERS,
    MOST_GROUPS,
    MOST_RANKS,
    MOST_ROWS,
    TP,
    SequenceOption,
    dtype_of,
)
from ascend_parallel.cli.output import console, errors, needs_file, progress_console, refuse_given
from ascend_parallel.tuning.cost_model.hardware import (
    DEFAULT_HARDWARE,
    Hardware,
    all_hardware,
    find_hardware,
    read_hardware,
)
from ascend_parallel.tuning.cost_model.tables import PlanningError, require
from ascend_parallel.tuning.step_time.runtimes import MEGATRON, PLANNED, RUNTIMES, Runtime

if TYPE_CHECKING:
    from ascend_parallel.tuning.cost_model.assumptions import Assumptions
    from ascend_parallel.tuning.cost_model.mindformers import MindFormersRun
    from ascend_parallel.tuning.cost_model.models import Model

# Options that a file of MindFormers gives.
GIVEN_BY_RUNS = (
    *("tp", "dp", "pp", "cp", "ep", "zero", "micro_batch", "micro_batches", "virtual_stages"),
    *("sequence_parallel", "recompute", "recompute_layers"),
)
EXAMPLES = """Predict the gain of overlap for a model, per layer and end to end, from a cost model; needs no device.

Examples:

  ascend-parallel predict --model llama2-70b --tp 8 --hardware 910b --seq 4096 --micro-batch 2

  ascend-parallel predict --model gpt3-175b --tp 8 --pp 16 --dp 78 --micro-batches 64 --hardware 910b1

  ascend-parallel predict --model llama2-7b --tp 2 --hardware cpu-gloo --link 1gbit --seq 1024

  ascend-parallel predict --model mixtral-8x7b --tp 2 --dp 32 --ep 8 --hardware 910b

  ascend-parallel predict --mindformers pretrain_qwen3_32b_4k.yaml --hardware 910b

  ascend-parallel predict --list

  ascend-parallel predict --hardware 910b --sources
"""


ModelName = Annotated[str | None, typer.Option("--model", help="A preset; --list shows them.")]
ModelFile = Annotated[
    Path | None,
    typer.Option(help="TOML file with layers, hidden, ffn, heads, vocab ..., or a model's config.json (transformers)."),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware", help=f"A preset (--list shows them), or a TOML file of your own; default: {DEFAULT_HARDWARE}."
    ),
]
HardwareFile = Annotated[Path | None, typer.Option(help="TOML file with a hardware's numbers; as --hardware FILE.")]
LinkRate = Annotated[str | None, typer.Option(help="Rate of each rank's link, such as 1gbit; cpu-gloo only.")]
TensorRanks = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Tensor-parallel ranks.")]
Replicas = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Data-parallel replicas.")]
Stages = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Pipeline stages.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, max=MOST_ROWS, help="Sequences per micro-batch; default: 1.")]
MicroBatches = Annotated[
    int | None, typer.Option(min=1, max=MOST_ROWS, help="Micro-batches per step and replica; default: 8 per stage.")
]
SequenceParallel = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="All-gather and reduce-scatter, or all-reduce; default: the first.",
    ),
]
VirtualStages = Annotated[
    int, typer.Option(min=1, max=MOST_ROWS, help="Pipeline stages of each rank; more than 1: interleaved.")
]
ContextRanks = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Context-parallel ranks of a sequence.")]
ContextExchange = Annotated[
    str | None,
    typer.Option(
        help="How keys reach the queries of context-parallel ranks: ring, heads (Ulysses) or gather; default: heads in "
        "a plan, else ring."
    ),
]
ContextGroups = Annotated[
    int,
    typer.Option(min=1, max=MOST_GROUPS, help="Groups of heads of an exchange or gather; 1: nothing of it is hidden."),
]
ExpertRanks = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Ranks that share the experts of each layer.")]
ExpertTensorRanks = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Ranks that share each expert's width.")]
Zero = Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")]
OverlapGradients = Annotated[
    bool | None,
    typer.Option(
        "--overlap-gradients/--no-overlap-gradients",
        help="Sum gradients under backward, in buckets; default: as the runtime does.",
    ),
]
RuntimeName = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        help=f"What runs the step: {', '.join(RUNTIMES)}; default: {PLANNED.name}, as plan-training plans it; "
        f"{MEGATRON.name}: Megatron-core with fused operators.",
    ),
]
RecomputeLayers = Annotated[int, typer.Option(min=0, help="Layers of each stage that are recomputed; 0: all.")]
RecomputeKind = Annotated[str, typer.Option(help="Activation recompute: none, selective or full.")]
Dtype = Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; default: the hardware's.")]
LaunchTime = Annotated[float | None, typer.Option(min=0, max=1e6, help="Host microseconds per matmul or collective.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML page with the lanes of a step with the best chunks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds.")]
MindFormersFile = Annotated[
    Path | None,
    typer.Option("--mindformers", help=MINDFORMERS + " Gives the model, unless it is given, and all degrees."),
]
ListAll = Annotated[bool, typer.Option("--list", help="List models and hardware.")]
Sources = Annotated[bool, typer.Option("--sources", help="Print every number of the hardware with its source.")]


def predict(
    ctx: typer.Context,
    model: ModelName = None,
    model_file: ModelFile = None,
    hardware: HardwareName = None,
    hardware_file: HardwareFile = None,
    link: LinkRate = None,
    tp: TensorRanks = TP,
    dp: Replicas = 1,
    pp: Stages = 1,
    seq: SequenceOption = None,
    micro_batch: MicroBatch = None,
    micro_batches: MicroBatches = None,
    sequence_parallel: SequenceParallel = None,
    virtual_stages: VirtualStages = 1,
    cp: ContextRanks = 1,
    cp_exchange: ContextExchange = None,
    cp_groups: ContextGroups = 1,
    ep: ExpertRanks = 1,
    etp: ExpertTensorRanks = 1,
    zero: Zero = 0,
    overlap_gradients: OverlapGradients = None,
    runtime: RuntimeName = None,
    recompute: RecomputeKind = "none",
    recompute_layers: RecomputeLayers = 0,
    dtype: Dtype = None,
    launch_us: LaunchTime = None,
    html: Html = None,
    as_json: AsJson = False,
    mindformers: MindFormersFile = None,
    list_all: ListAll = False,
    sources: Sources = False,
) -> None:
    """Run the command; the help text is `EXAMPLES`."""
    from ascend_parallel.tuning.cost_model.assumptions import Assumptions
    from ascend_parallel.tuning.cost_model.report import show
    from ascend_parallel.tuning.cost_model.step import Layout

    out = console()
    with errors("predict", ArithmeticError):  # ArithmeticError: from a file's numbers, such as a bandwidth of 0
        if list_all:
            _list(out, as_json)
            return
        run = None if mindformers is None else _run(mindformers, ctx)
        if run is not None:
            tp, dp, pp, cp, ep, zero = run.tp, run.dp, run.pp, run.cp, run.expert_ranks, run.zero_stage
            virtual_stages, micro_batches, micro_batch = run.virtual_stages, run.micro_batches, run.micro_batch
            seq, sequence_parallel = seq or run.sequence, run.sequence_parallel and run.tp > 1
            recompute, recompute_layers = "full" if run.recomputes else "none", run.most_recomputed
        machine = hardware_of(hardware, hardware_file, link, launch_us)
        if sources:
            _show_sources(machine, out, as_json)
            return
        work = Assumptions(
            hardware=machine,
            layout=Layout(
                dp=dp,
                pp=pp,
                micro_batches=micro_batches or 8 * pp,
                recompute=recompute,
                virtual_stages=virtual_stages,
                recompute_layers=recompute_layers,
                zero=zero,
                overlap_gradients=overlap_gradients,
                runtime=runtime_of(runtime or PLANNED.name),
            ),
            dtype=dtype_of(dtype or machine.dtype),
            tp=tp,
            cp=cp,
            cp_exchange=cp_exchange or "",
            cp_groups=cp_groups,
            ep=ep,
            etp=etp,
            sequence=seq,
            micro_batch=micro_batch,
            sequence_parallel=sequence_parallel is not False,
        )
        if html is not None:
            needs_file("--html", html)
        with progress_console(as_json).status("predicting"):
            of_file = run is not None and model is None and model_file is None
            described = run.model() if run is not None and of_file else _model(model, model_file)
            notes = [] if run is None else run.notes(described)
            result = _predicted(described, work, html) | {"notes": notes}
    if as_json:
        typer.echo(json.dumps(result if run is None else result | {"mindformers": run.as_dict()}, indent=2))
        return
    show(result, out)
    if run is not None:
        out.print(f"\n{run.report()}", markup=False, highlight=False)


def _run(path: Path, ctx: typer.Context) -> MindFormersRun:
    """Return the run of a file; refuses options beside it that it gives too."""
    from ascend_parallel.tuning.cost_model.mindformers import read_mindformers

    refuse_given(ctx, "--mindformers", GIVEN_BY_RUNS, "which the file gives")
    return read_mindformers(path)


def _predicted(model: Model, work: Assumptions, html: Path | None) -> dict[str, Any]:
    """Return the prediction of a step, and write its lanes."""
    from ascend_parallel.tuning.cost_model.layer_passes import BEST
    from ascend_parallel.tuning.cost_model.report import predict as predicted
    from ascend_parallel.tuning.cost_model.report import summary
    from ascend_parallel.tuning.cost_model.step import step_work

    batch = work.batch(model)
    prediction = predicted(model, batch, work.layout, work.hardware)
    if html is not None:
        from ascend_parallel.tuning.step_time.lanes import page

        step = step_work(work.costs, model, batch, work.layout, BEST)
        title = f"{model.name} on {work.hardware.name}: a predicted step"
        html.write_text(page(step, title, summary(prediction)), encoding="utf-8")
    return prediction


def hardware_of(name: str | None, path: Path | None, link: str | None, launch_us: float | None) -> Hardware:
    """Return the hardware of `--hardware`, `--hardware-file`, `--link` and `--launch-us`."""
    if name is not None and path is not None:
        raise PlanningError(f"give either --hardware or --hardware-file. Known: {', '.join(all_hardware())}")
    hardware = read_hardware(path) if path is not None else find_hardware(name or DEFAULT_HARDWARE)
    if link is not None:
        hardware = hardware.with_link(link)
    return hardware if launch_us is None else hardware.with_launch(launch_us * 1e-6)


def runtime_of(name: str) -> Runtime:
    """Return the runtime of `--runtime`."""
    require("--runtime", name, name in RUNTIMES, ", ".join(RUNTIMES))
    return RUNTIMES[name]


def _model(name: str | None, path: Path | None) -> Model:
    from ascend_parallel.tuning.cost_model.models import all_models, find_model, read_model

    if (name is None) == (path is None):
        raise PlanningError(f"give --model, --model-file or --mindformers. Known models: {', '.join(all_models())}")
    return read_model(path) if path is not None else find_model(name or "")


def _show_sources(machine: Hardware, out: Console, as_json: bool) -> None:
    from ascend_parallel.tuning.cost_model.report import show_sources

    if not as_json:
        show_sources(machine, out)
        return
    numbers = {name: asdict(number) for name, number in machine.numbers.items()}
    typer.echo(json.dumps({"hardware": machine.name, "title": machine.title, "numbers": numbers}, indent=2))


def _list(out: Console, as_json: bool) -> None:
    from ascend_parallel.tuning.cost_model.models import all_models

    if as_json:
        models = [
            {
                "name": model.name,
                "title": model.title,
                "parameters": model.count_parameters(),
                "active_parameters": model.count_active(),
            }
            for model in all_models().values()
        ]
        machines = [
            {"name": machine.name, "title": machine.title, "aliases": list(machine.aliases)}
            for machine in all_hardware().values()
        ]
        typer.echo(json.dumps({"models": models, "hardware": machines}, indent=2))
        return
    out.print("models", style="bold")
    for model in all_models().values():
        out.print(
            f"  {model.name:20} {model.title}, {model.count_parameters() / 1e9:.1f}B", markup=False, highlight=False
        )
    out.print("hardware", style="bold")
    for hardware in all_hardware().values():
        names = ", ".join(hardware.aliases)
        out.print(f"  {hardware.name:20} {hardware.title}; also {names}", markup=False, highlight=False)
