"""``ascend-parallel plan-training``: search the degrees of a training, and write the best strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_parallel.cli.options import MINDFORMERS, MOST_GROUPS
from ascend_parallel.cli.output import console, errors, needed, needs_file, needs_sharding, progress_console
from ascend_parallel.cli.propagate import HARDWARE, build_model, bytes_of, refuse_sizes
from ascend_parallel.text import size_of
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware
from ascend_parallel.tuning.cost_model.tables import lookup

if TYPE_CHECKING:
    from ascend_parallel.training.confirm_degrees import ConfirmedCandidate
    from ascend_parallel.training.degrees.search import SearchResult
    from ascend_parallel.tuning.cost_model.models import Model

MOST_RANKS, MOST_ROWS = 1 << 17, 1 << 30
FLOAT32 = "float32"
DTYPES = ("bfloat16", FLOAT32)
FILES = (".json", ".toml")
Progress = Callable[[str], None]


def plan_training(
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset (ascend-parallel predict --list), a config.json of transformers or a TOML file of sizes, or "
            "MODULE:FUNCTION that returns (model, batch[, loss])."
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, max=MOST_RANKS, help="The number of ranks; all are used.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Memory of a rank, such as 60e9 or 60GB.")] = None,
    mindformers: Annotated[
        Path | None, typer.Option(help=MINDFORMERS + " Gives what is not given: model, ranks, memory, batch, seq.")
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Ranks that share the experts of each layer; default: searched."),
    ] = None,
    cp: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RANKS, help="Ranks that share each sequence; default: searched from 32768 tokens, else 1."
        ),
    ] = None,
    cp_exchange: Annotated[
        str | None,
        typer.Option(
            metavar="[heads|gather]",
            help="How these bring a sequence together: heads (Ulysses) or gather; default: what takes least time.",
        ),
    ] = None,
    cp_groups: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_GROUPS,
            help="In how many groups of heads, each sent under the attention of another; default: the least time.",
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help=HARDWARE)] = DEFAULT_HARDWARE,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_ROWS, help="Presets: sequences of a step; default: 4M tokens, a multiple of ranks."
        ),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Presets: sequence length; default: the model's, or 4096.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Mixed precision with fp32 master weights: bfloat16; float32: none. Default: the hardware's; "
            "a model of your own stays as it is."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The strategy's TOML; default: MODEL-RANKS.toml in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds and bytes.")] = False,
) -> None:
    """Search data, expert, context, tensor and pipeline parallel sizes, micro-batches, schedule, recompute and ZeRO.

    Prints the ten fastest by the cost model that fit, with the reasons why the others are slower, and writes the
    fastest as a strategy. Starts no process and needs no device. docs/degrees.md has the formulas and their sources.

    Examples:

      ascend-parallel plan-training --model llama2-7b --ranks 64 --memory 60GB --hardware 910b

      ascend-parallel plan-training --model my_models:planned --ranks 8 --memory 30GB --hardware cpu-gloo --json

      ascend-parallel plan-training --mindformers pretrain_qwen3_32b_4k.yaml --memory 60GB
    """
    needs_sharding("plan-training")
    from ascend_parallel.training.degrees.report import as_dict, text, toml_of
    from ascend_parallel.tuning.cost_model.mindformers import read_mindformers
    from ascend_parallel.tuning.cost_model.models import Model

    with errors("plan-training", ImportError, ArithmeticError), progress_console(as_json).status("planning") as status:
        run = None if mindformers is None else read_mindformers(mindformers, ranks)
        if run is not None:
            ranks, memory = ranks or run.ranks, memory or run.memory
        ranks, memory = needed("--ranks", ranks, "--mindformers"), needed("--memory", memory, "--mindformers")
        limit = bytes_of(memory, "--memory")
        if run is not None and ":" not in (model or ""):
            batch, seq = batch or run.batch, seq or run.sequence
        planned_model = run.model() if run is not None and model is None else needed("--model", model, "--mindformers")
        name = planned_model.name if isinstance(planned_model, Model) else planned_model
        file = out or Path(f"{Path(name).stem if name.endswith(FILES) else name.rpartition(':')[2]}-{ranks}.toml")
        _check_file(file)
        amp = None if dtype is None else lookup("--dtype", dtype, dict.fromkeys(DTYPES, dtype))
        job = {"ranks": ranks, "memory": limit, "ep": ep, "cp": cp, "cp_exchange": cp_exchange, "cp_groups": cp_groups}
        found, planned = _searched(planned_model, batch, seq, amp, hardware, status.update, **job)
        best = found.best[planned.place]
        file.write_text(toml_of(found.tables(best), found, best), encoding="utf-8")
    if as_json:
        more = {"file": str(file), "planned": vars(planned)} | ({} if run is None else {"mindformers": run.as_dict()})
        typer.echo(json.dumps(as_dict(found) | more, indent=1))
        return
    typer.echo(text(found, console().width))
    for candidate, size in zip(found.best, planned.too_large, strict=False):
        typer.echo(f"left out: {candidate}; planned as a whole it needs {size_of(size)}")
    typer.echo(f"the plan of the whole model: {size_of(planned.memory)} a rank, without buffers")
    typer.echo(f"wrote {file}: {best}")
    if run is not None:
        typer.echo(f"\n{run.report()}")


def _searched(
    name: str | Model,
    batch: int | None,
    seq: int | None,
    amp: str | None,
    hardware: str,
    progress: Progress,
    **job: Any,
) -> tuple[SearchResult, ConfirmedCandidate]:
    """Return the result of a search, and the first of its best that fits as a whole.

    name: a user's function, a preset of the cost model, a file of sizes, or a model. job: ranks, memory, ep, and cp
    with how its ranks share sequences.
    """
    from ascend_parallel.training import AmpOptions, search_degrees
    from ascend_parallel.training.confirm_degrees import planned_whole
    from ascend_parallel.training.degrees.presets import built_preset, preset_of, traced_preset
    from ascend_parallel.training.degrees.search import search_traced
    from ascend_parallel.training.loss import mean_loss

    job |= {"hardware": hardware, "progress": progress}
    if isinstance(name, str) and ":" in name:
        refuse_sizes(name, batch, seq)
        model, data, loss = build_model(name, with_loss=True)
        options = AmpOptions(dtype=None if amp == FLOAT32 else amp)
        found = search_degrees(model, data, loss=loss or mean_loss, amp=options, **job)
    else:
        preset, length, size = preset_of(name, job["ranks"], seq, batch)
        found = search_traced(traced_preset(preset, length, size, amp or find_hardware(hardware).dtype), **job)
        (model, data), loss = built_preset(preset, length, size), None
    progress("planning the whole model")
    return found, planned_whole(found, model, data, loss or mean_loss)


def _check_file(file: Path) -> None:
    """Refuse a file that this command has not written, and a folder that there is not."""
    from ascend_parallel.training.degrees.report import HEADER

    needs_file("--out", file)
    if file.exists() and not (file.is_file() and file.read_text(encoding="utf-8", errors="replace").startswith(HEADER)):
        raise ValueError(f"--out {file}: the file exists and was not written by plan-training; give another name")
