"""``ascend-parallel bench`` and ``ascend-parallel tune``: time layers on this machine's processors."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_parallel.cli.options import (
    DTYPES,
    MOST_ROWS,
    TP_HERE,
    BatchOption,
    DeviceOption,
    LayerOption,
    ModelOption,
    ParallelOption,
    SequenceOption,
    ShapeOption,
    dtype_of,
)
from ascend_parallel.cli.output import console, errors, needs_file, refuse_unread
from ascend_parallel.devices import CPU, DEVICES
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup
from ascend_parallel.tuning.launch.user_namespaces import LinkError

if TYPE_CHECKING:
    from ascend_parallel.tuning.measured.chunk_plan import Entry, Machine, Plan


RanksOption = Annotated[int, typer.Option("--tp", min=2, max=64, help="Processes to start on this machine.")]
ScaleOption = Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="For --model: divide its widths by this number.")]
DtypeOption = Annotated[str, typer.Option(help=", ".join(DTYPES))]
ChunksOption = Annotated[str, typer.Option(help="Chunk counts to try, separated by commas.")]
RoundsOption = Annotated[int, typer.Option(min=3, max=1000, help="Timings of each variant.")]
ORDERS = {"1": ["1"], "tp": ["1", "tp"]}
MoeOption = Annotated[
    str | None,
    typer.Option(
        metavar="EXPERTS,ROWS,HIDDEN,INNER", help="Time a layer of experts instead; --chunks are groups of experts."
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS,HEADS,KEYS,WIDTH",
        help="Time attention of a sequence that the ranks share instead; --chunks are groups of heads.",
    ),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="A slow link of this rate: 1gbit; as root or in a user namespace.",
    ),
]


def bench(
    ctx: typer.Context,
    model: ModelOption = None,
    shape: ShapeOption = None,
    layer: LayerOption = "both",
    tp: RanksOption = TP_HERE,
    seq: SequenceOption = None,
    micro_batch: BatchOption = 1,
    scale: ScaleOption = 1,
    sequence_parallel: ParallelOption = True,
    dtype: DtypeOption = CPU.dtype,
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
    moe: MoeOption = None,
    context: ContextOption = None,
    shared: Annotated[int, typer.Option(min=0, max=MOST_ROWS, help="For --moe: width of a shared expert.")] = 0,
    framework: Annotated[
        str | None,
        typer.Option(help="Time the row-parallel layer of this framework, its own code and in chunks: vllm."),
    ] = None,
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

      ascend-parallel bench --context 4096,16,4,64 --link 1gbit

      ascend-parallel bench --framework vllm --shape 2048,1024,768 --link 1gbit
    """
    from ascend_parallel.cli.bench_request import TIMED_FRAMEWORKS, request_of
    from ascend_parallel.tuning.bench.results import plot, result_rows, show

    if moe is not None or context is not None:
        with errors("bench", LinkError):
            parts = _parts_of(moe, context, shared, model, shape, tp, dtype, chunks, device, every_exchange=True)
            refuse_unread(ctx, parts.option)
            _bench_parts(parts, tp, rounds, link, as_json)
        return
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")
    with errors("bench", LinkError):
        if plot_file is not None:
            needs_file("--plot", plot_file)
        timed = None if framework is None else lookup("--framework", framework, TIMED_FRAMEWORKS)
        if timed is not None:
            refuse_unread(ctx, "--framework")
        asked = model, shape, layer, tp, seq, micro_batch, scale, sequence_parallel, dtype, chunks, rounds, link, device
        request = request_of(*asked, framework=timed)
        refuse_unread(ctx, "--shape" if shape else "--model")
        orders = [] if deterministic is None else lookup("--deterministic", deterministic, ORDERS)
        measured = request.measure(as_json, orders)
        rows = result_rows(request.names, measured["passes"])
        if as_json:
            typer.echo(json.dumps(request.report(measured, rows), indent=1))
        else:
            show(rows, request.conditions(measured), console(), every=every or bool(orders))
        if plot_file is not None:
            plot(rows, request.conditions(measured), plot_file)


@dataclass(frozen=True, kw_only=True)
class _PartsRequest:
    """An exchange around parts to time: experts, or heads of attention.

    option  that asks for it
    module  the module of the package that times it, with `measure` and `tune`
    case    what is exchanged, a dataclass
    groups  the numbers of groups to try
    """

    option: str
    module: str
    case: Any
    groups: list[int]

    def call(self, function: str, as_json: bool, ranks: int, **options: Any) -> dict[str, Any]:
        """Run a function of the module on new ranks and return its result."""
        from ascend_parallel.cli.bench_request import call_with_progress

        asked = {"case": asdict(self.case), "groups": self.groups, **options}
        return call_with_progress(as_json, f"{self.module}:{function}", ranks, **asked)


def _parts_of(
    moe: str | None,
    context: str | None,
    shared: int,
    model: str | None,
    shape: list[str] | None,
    tp: int,
    dtype: str,
    chunks: str,
    device: str | None,
    *,
    every_exchange: bool = False,
) -> _PartsRequest:
    """Return the request of --moe or --context; raises `PlanningError` for what is not allowed.

    every_exchange: as many groups as any exchange allows, not only the one that runs.
    """
    from ascend_parallel.cli.bench_request import chunk_counts, requested_device
    from ascend_parallel.ops.key_gather import EXCHANGES
    from ascend_parallel.tuning.bench.attention import AttentionCase
    from ascend_parallel.tuning.bench.experts import ExpertsCase
    from ascend_parallel.tuning.launch.devices import CPU

    option = "--context" if moe is None else "--moe"
    if model is not None or shape or (moe is not None and context is not None):
        raise PlanningError("give one of --model, --shape, --moe and --context")
    if device is not None and requested_device(device, tp, None) != CPU:
        raise PlanningError(f"--device {device}: {option} is timed on CPUs")
    dtype_of(dtype)
    case: AttentionCase | ExpertsCase
    if context is not None:
        case = AttentionCase.parse(context, dtype, tp)
    else:
        case = ExpertsCase.parse(moe or "", shared, dtype, tp)
    most = case.parts(tp)
    if every_exchange and isinstance(case, AttentionCase):
        most = max(case.parts(tp, exchange) for exchange in EXCHANGES)
    groups = [count for count in chunk_counts(chunks) if count <= most]
    return _PartsRequest(option=option, module=type(case).__module__, case=case, groups=groups)


def _bench_parts(parts: _PartsRequest, tp: int, rounds: int, link: str | None, as_json: bool) -> None:
    from ascend_parallel.cli.bench_request import SECONDS_A_PASS
    from ascend_parallel.tuning.bench.attention import Projections
    from ascend_parallel.tuning.bench.exchanges import as_dict, show

    limit = 60 + SECONDS_A_PASS * max(1.0, rounds / 15) * 6
    measured = parts.call("measure", as_json, tp, limit=limit, link=link, rounds=rounds)
    more = {name: measured[name] for name in ("projections",) if name in measured}
    if as_json:
        typer.echo(json.dumps(as_dict(parts.case, measured["times"], measured["auto"]) | more, indent=1))
        return
    over = f"a link of {link}" if link else "loopback"
    conditions = (
        f"{parts.case}; {tp} ranks of one thread over {over}; torch {measured['torch']}; medians of {rounds} rounds"
    )
    show(measured["times"], measured["auto"], conditions, console())
    for projections in more.values():
        console().print(str(Projections(**projections)), markup=False)


def tune(
    ctx: typer.Context,
    model: ModelOption = None,
    shape: ShapeOption = None,
    layer: LayerOption = "both",
    tp: RanksOption = TP_HERE,
    seq: SequenceOption = None,
    micro_batch: BatchOption = 1,
    scale: ScaleOption = 1,
    sequence_parallel: ParallelOption = True,
    dtype: DtypeOption = CPU.dtype,
    chunks: ChunksOption = "2,3,4,6,8,12",
    rounds: RoundsOption = 15,
    link: LinkOption = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write; default: the cache of COC_PARALLEL_NUM=auto.")
    ] = None,
    moe: MoeOption = None,
    context: ContextOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan.")] = False,
) -> None:
    """Time a model's layers and write the fastest chunk sizes to a plan; one chunk where overlap loses.

    COC_TUNE=plan.json measures the shapes of a run during the run; this command measures before the run.

    Examples:

      ascend-parallel tune --model llama2-7b --scale 8 --seq 512 --out plan.json

      ascend-parallel tune --moe 8,1024,1024,512 --out plan.json

      ascend-parallel tune --context 4096,16,4,64 --out plan.json

      COC_PLAN=plan.json torchrun --nproc-per-node 2 train.py
    """
    from ascend_parallel.cli.bench_request import SECONDS_A_PASS, request_of
    from ascend_parallel.tuning.bench.results import result_rows, show
    from ascend_parallel.tuning.launch.devices import CPU
    from ascend_parallel.tuning.measured.chunk_plan import cached_plan, differences, load_plan, read_plan

    parts = None
    with errors("tune", LinkError):
        if moe is not None or context is not None:
            parts = _parts_of(moe, context, 0, model, shape, tp, dtype, chunks, device)
            refuse_unread(ctx, parts.option, "rounds")
        else:
            request = request_of(
                model, shape, layer, tp, seq, micro_batch, scale, sequence_parallel, dtype, chunks, rounds, link, device
            )
            refuse_unread(ctx, "--shape" if shape else "--model")
        if out is None and link is not None:
            raise PlanningError("--link needs --out: the cache holds plans for this machine's own links")
        if out is not None:
            _check_plan(out, tp, CPU if parts is not None else request.device)
        if parts is not None:
            if not parts.groups:
                most = parts.case.parts(tp)
                raise PlanningError(f"--chunks {chunks}: {parts.case} can be cut into at most {most} on {tp} ranks")
            measured = parts.call("tune", as_json, tp, limit=60 + 4 * SECONDS_A_PASS, link=link)
        else:
            measured = replace(request, fused=False).measure(as_json)
        plan = read_plan(measured["plan"])
        path = out if out is not None else cached_plan(plan.machine)
        if path.exists():
            saved = load_plan(str(path), "--out")
            if out is not None:
                _refuse_elsewhere(out, saved, plan.machine)
            if not differences(saved, plan.machine):
                plan = saved.with_entries(plan.entries)
        plan.save(path)
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=1))
        return
    if parts is None:
        rows = result_rows(request.names, measured["passes"])
        show(rows, request.conditions(measured), console(), kept=True)
    else:
        typer.echo(f"{parts.case}: {_in_words(read_plan(measured['plan']).entries[0])}")
    won = sum(len(entry.sizes) > 1 for entry in plan.entries)
    typer.echo(f"{path}: {len(plan.entries)} passes, {won} overlapped, {len(plan.entries) - won} in one chunk")


def _check_plan(file: Path, ranks: int, device: str) -> None:
    """Refuse a file that is no plan, and a plan that was measured elsewhere: neither is overwritten."""
    import torch

    from ascend_parallel.tuning.measured.chunk_plan import load_plan, this_machine

    if file.exists():
        here = replace(
            this_machine(ranks, torch.device(device), DEVICES[device].backend), threads=1
        )  # as the ranks have
        _refuse_elsewhere(file, load_plan(str(file), "--out"), here)
    needs_file("--out", file, made=True)


def _refuse_elsewhere(file: Path, saved: Plan, here: Machine) -> None:
    """Raise `PlanningError` if a file's plan was measured on another machine than `here`."""
    from ascend_parallel.tuning.measured.chunk_plan import differences

    if found := differences(saved, here):
        raise PlanningError(f"--out {file}: a plan of another machine, {'; '.join(found)}: give another name")


def _in_words(entry: Entry) -> str:
    """Return the groups of an entry of an exchange with its times."""
    from ascend_parallel.tuning.measured.chunk_plan import in_turn_of

    serial, chosen = (f"{1e3 * seconds:.1f} ms" for seconds in (entry.serial, entry.chosen))
    if len(entry.sizes) == 1:
        return f"{in_turn_of(entry.operator)}, {serial} forward and backward; no groups won"
    return f"{len(entry.sizes)} groups, {chosen} forward and backward; in turn {serial}"
