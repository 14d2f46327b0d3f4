"""``ascend-parallel bench`` and ``ascend-parallel tune``: time layers on this machine's processors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ascend_parallel.cli.output import console, errors, needs_folder, progress_console
from ascend_parallel.text import shown, whole
from ascend_parallel.tuning.bench import experts
from ascend_parallel.tuning.bench.results import Row, plot, rows_of, show
from ascend_parallel.tuning.bench.shapes import model_cases, scaled, shape_cases
from ascend_parallel.tuning.cost_model.models import Batch, find_model
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup
from ascend_parallel.tuning.launch.devices import BACKENDS, CPU, device_for
from ascend_parallel.tuning.launch.ranks import call_on_ranks
from ascend_parallel.tuning.launch.user_namespaces import LinkError
from ascend_parallel.tuning.measured.chunk_plan import cached_plan, differences, load_plan
from ascend_parallel.tuning.measured.chunk_plan import read_plan as plan_of

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
LAYERS = ("row", "column")
SECONDS_A_PASS = 60.0
MOST_ROWS = 1 << 30
WIDTH = 160  # of output that is not a terminal

ModelOption = Annotated[str | None, typer.Option(help="A preset's layers: ascend-parallel predict --list.")]
ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", metavar="M,K,N", help="Matmul [M, K] x [K, N]; may be repeated.")
]
LayerOption = Annotated[str, typer.Option(help="For --shape: row, column or both.")]
RanksOption = Annotated[int, typer.Option("--tp", min=2, max=64, help="Processes to start on this machine.")]
SequenceOption = Annotated[int, typer.Option("--seq", min=1, max=MOST_ROWS, help="For --model: sequence length.")]
BatchOption = Annotated[
    int, typer.Option("--micro-batch", min=1, max=MOST_ROWS, help="For --model: sequences per micro-batch.")
]
ScaleOption = Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="For --model: divide its widths by this number.")]
ParallelOption = Annotated[bool, typer.Option(help="All-gather and reduce-scatter, or all-reduce.")]
DtypeOption = Annotated[str, typer.Option(help=", ".join(DTYPES))]
ChunksOption = Annotated[str, typer.Option(help="Chunk counts to try, separated by commas.")]
RoundsOption = Annotated[int, typer.Option(min=3, max=1000, help="Timings of each variant.")]
ORDERS = {"1": ["1"], "tp": ["1", "tp"]}
LinkOption = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="A slow link of this rate: 1gbit; as root or in a user namespace.",
    ),
]


DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda or npu; default: what has a device for each process, otherwise the CPU.")
]


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The layers to time and the conditions."""

    names: list[str]
    cases: list[dict[str, Any]]
    ranks: int
    chunks: list[int]
    fused: bool
    rounds: int
    link: str | None
    device: str
    title: str

    @property
    def limit(self) -> float:
        """Seconds after which the ranks are ended."""
        return 60 + SECONDS_A_PASS * 2 * len(self.cases) * max(1.0, self.rounds / 15)


def bench(
    model: ModelOption = None,
    shape: ShapeOption = None,
    layer: LayerOption = "both",
    tp: RanksOption = 2,
    seq: SequenceOption = 1024,
    micro_batch: BatchOption = 1,
    scale: ScaleOption = 1,
    sequence_parallel: ParallelOption = True,
    dtype: DtypeOption = "float32",
    chunks: ChunksOption = "2,4,8",
    rounds: RoundsOption = 15,
    link: LinkOption = None,
    device: DeviceOption = None,
    deterministic: Annotated[
        str | None,
        typer.Option(metavar="1|tp", help="Time the values of COC_DETERMINISTIC up to this too, and print all lines."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a line for every variant, not only the best.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write a chart to this file: .png, .svg, .pdf.")
    ] = None,
    moe: Annotated[
        str | None,
        typer.Option(
            metavar="EXPERTS,ROWS,HIDDEN,INNER", help="Time a layer of experts instead; --chunks are groups of experts."
        ),
    ] = None,
    shared: Annotated[int, typer.Option(min=0, max=MOST_ROWS, help="For --moe: width of a shared expert.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds.")] = False,
) -> None:
    """Time linear layers: serial, in chunks, with the cost model's chunk sizes and fused, beside the lower bound.

    Every round times all variants in a random order. The table has medians and the interval of the paired speedup.
    The best variant is the fastest whose whole interval lies above 1; without such a variant, serial is best.

    Examples:

      ascend-parallel bench --shape 2048,1024,1024 --link 1gbit

      ascend-parallel bench --model llama2-7b --scale 8 --seq 512 --all

      ascend-parallel bench --model llama3-8b --scale 4 --tp 4 --json > bench.json

      ascend-parallel bench --shape 2048,1024,1024 --deterministic tp

      ascend-parallel bench --moe 8,1024,1024,512 --shared 128 --link 1gbit
    """
    if moe is not None:
        with errors("bench", LinkError):
            _bench_experts(moe, shared, model, shape, tp, dtype, chunks, rounds, link, device, as_json)
        return
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install ascend_parallel[plot]", param_hint="--plot")
    with errors("bench", LinkError):
        if plot_file is not None:
            needs_folder("--plot", plot_file)
        request = _request(
            model, shape, layer, tp, seq, micro_batch, scale, sequence_parallel, dtype, chunks, rounds, link, device
        )
        orders = [] if deterministic is None else lookup("--deterministic", deterministic, ORDERS)
        measured = _measure(request, as_json, orders)
        rows = rows_of(request.names, measured["passes"])
        if as_json:
            typer.echo(json.dumps(_report(request, measured, rows), indent=1))
        else:
            show(rows, _conditions(request, measured), console(WIDTH), every=every or bool(orders))
        if plot_file is not None:
            plot(rows, _conditions(request, measured), plot_file)


def _bench_experts(
    moe: str,
    shared: int,
    model: str | None,
    shapes: list[str] | None,
    tp: int,
    dtype: str,
    chunks: str,
    rounds: int,
    link: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    if model is not None or shapes:
        raise PlanningError("give one of --model, --shape and --moe")
    if requested_device(device, tp, link) != CPU and device is not None:
        raise PlanningError(f"--device {device}: --moe is timed on CPUs")
    lookup("--dtype", dtype, DTYPES)
    case = experts.ExpertsCase.parse(moe, shared, dtype, tp)
    groups = [count for count in _counts(chunks) if count <= case.experts // tp]
    with progress_console(as_json).status("starting the ranks", refresh_per_second=2) as status:
        measured = call_on_ranks(
            "ascend_parallel.tuning.bench.experts:measure",
            tp,
            limit=60 + SECONDS_A_PASS * max(1.0, rounds / 15) * 4,
            link=link,
            on_progress=status.update,
            case=asdict(case),
            groups=groups,
            rounds=rounds,
        )
    if as_json:
        typer.echo(json.dumps(experts.as_dict(case, measured["times"]), indent=1))
        return
    over = f"a link of {link}" if link else "loopback"
    conditions = f"{case}; {tp} ranks of one thread over {over}; torch {measured['torch']}; medians of {rounds} rounds"
    experts.show(measured["times"], conditions, console(WIDTH))


def tune(
    model: ModelOption = None,
    shape: ShapeOption = None,
    layer: LayerOption = "both",
    tp: RanksOption = 2,
    seq: SequenceOption = 1024,
    micro_batch: BatchOption = 1,
    scale: ScaleOption = 1,
    sequence_parallel: ParallelOption = True,
    dtype: DtypeOption = "float32",
    chunks: ChunksOption = "2,3,4,6,8,12",
    rounds: RoundsOption = 15,
    link: LinkOption = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write; default: the cache of COC_PARALLEL_NUM=auto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan.")] = False,
) -> None:
    """Time a model's layers and write the fastest chunk sizes to a plan; one chunk where overlap loses.

    COC_TUNE=plan.json measures the shapes of a run during the run; this command measures before the run.

    Examples:

      ascend-parallel tune --model llama2-7b --scale 8 --seq 512 --out plan.json

      COC_PLAN=plan.json torchrun --nproc-per-node 2 train.py
    """
    with errors("tune", LinkError):
        request = _request(
            model, shape, layer, tp, seq, micro_batch, scale, sequence_parallel, dtype, chunks, rounds, link, device
        )
        if out is None and link is not None:
            raise PlanningError("--link needs --out: the cache holds plans for this machine's own links")
        if out is not None and out.exists():
            load_plan(str(out), "--out")  # refuse to overwrite a file that is not a plan
        measured = _measure(replace(request, fused=False), as_json)
        plan = plan_of(measured["plan"])
        path = out if out is not None else cached_plan(plan.machine)
        if path.exists() and not differences(saved := load_plan(str(path), "--out"), plan.machine):
            plan = saved.with_entries(plan.entries)
        plan.save(path)
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=1))
        return
    rows = rows_of(request.names, measured["passes"])
    show(rows, _conditions(request, measured), console(WIDTH), kept=True)
    won = sum(len(entry.sizes) > 1 for entry in plan.entries)
    typer.echo(f"{path}: {len(plan.entries)} passes, {won} overlapped, {len(plan.entries) - won} in one chunk")


def _request(
    model: str | None,
    shapes: list[str] | None,
    layer: str,
    tp: int,
    seq: int,
    micro_batch: int,
    scale: int,
    sequence_parallel: bool,
    dtype: str,
    chunks: str,
    rounds: int,
    link: str | None,
    device: str | None,
) -> BenchRequest:
    if (model is None) == (not shapes):
        raise PlanningError("give either --model or --shape")
    chosen, place = lookup("--dtype", dtype, DTYPES), requested_device(device, tp, link)
    if model is not None:
        wide = find_model(model)
        batch = Batch(
            sequence=seq,
            micro_batch=micro_batch,
            tp=tp,
            sequence_parallel=sequence_parallel,
            dtype=chosen,
            device=place,
        )
        names, cases = model_cases(scaled(wide, scale), batch)
        title = wide.title + (f", {scale} times narrower" if scale > 1 else "")
    else:
        kinds = lookup("--layer", layer, {"both": LAYERS, "row": ("row",), "column": ("column",)})
        names, cases = shape_cases(shapes or [], kinds, tp, sequence_parallel, chosen)
        title = "shapes"
    counts = _counts(chunks)
    return BenchRequest(
        names=names,
        cases=cases,
        ranks=tp,
        chunks=counts,
        fused=True,
        rounds=rounds,
        link=link,
        device=place,
        title=f"{title}, {dtype}",
    )


def requested_device(requested: str | None, ranks: int, link: str | None) -> str:
    """Return the type of device to measure on; raises `PlanningError` if this machine has too few of a request."""
    found = CPU if link is not None else device_for(ranks)
    if requested is None or lookup("--device", requested, {kind: kind for kind in BACKENDS}) in (found, CPU):
        return requested or found
    why = "--link is a link between CPUs" if link is not None else f"not one of them for each of {ranks} ranks is here"
    raise PlanningError(f"--device {requested}: {why}")


def _counts(chunks: str) -> list[int]:
    counts = [whole(text) or 0 for text in chunks.split(",")]
    if min(counts) < 2 or max(counts) > 64:
        raise PlanningError(
            f"--chunks {shown(chunks)}: give counts from 2 to 64, such as 2,4,8; one chunk is timed anyway"
        )
    return counts


def _measure(request: BenchRequest, as_json: bool, deterministic: Sequence[str] = ()) -> dict[str, Any]:
    with progress_console(as_json).status("starting the ranks", refresh_per_second=2) as status:
        measured: dict[str, Any] = call_on_ranks(
            "ascend_parallel.tuning.bench.passes:measure",
            request.ranks,
            limit=request.limit,
            link=request.link,
            device=request.device,
            on_progress=lambda line: status.update(line.replace("[", r"\[")),
            cases=request.cases,
            chunks=request.chunks,
            fused=request.fused and request.link is None,
            rounds=request.rounds,
            deterministic=list(deterministic),
        )
    return measured


def _conditions(request: BenchRequest, measured: dict[str, Any]) -> str:
    over = f"of one thread over a link of {request.link}" if request.link else "of one thread over loopback"
    if request.device != CPU:
        over = f"on devices of type {request.device}"
    return (
        f"{request.title}; {request.ranks} ranks {over}; torch {measured['torch']}; "
        f"medians of {request.rounds} rounds, ms"
    )


def _report(request: BenchRequest, measured: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    return {
        "conditions": _conditions(request, measured),
        "ranks": request.ranks,
        "link": request.link,
        "passes": [row.as_dict() for row in rows],
        "times": [result["times"] for result in measured["passes"]],
        "plan": measured["plan"],
    }
