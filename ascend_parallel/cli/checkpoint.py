"""``ascend-parallel checkpoint``: show, compare and convert checkpoints in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.tree import Tree

from ascend_parallel.cli.commands import Command, Commands
from ascend_parallel.cli.options import DTYPES, dtype_of
from ascend_parallel.cli.output import console, errors, needs_sharding, progress_console
from ascend_parallel.text import dtype_name, size_of
from ascend_parallel.text.folded_rows import fold
from ascend_parallel.tuning.cost_model.tables import lookup

if TYPE_CHECKING:  # imported where it is used: the import takes a second
    from ascend_parallel.training.checkpoint import CheckpointReader


app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Show, compare and convert checkpoints."
)

Full = Annotated[bool, typer.Option(help="Show every repeated layer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Step = Annotated[int | None, typer.Option(min=0, help="Step in a folder of checkpoints; default: the latest.")]


@app.command(cls=Command)
def show(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of checkpoints.")],
    step: Step = None,
    full: Full = False,
    as_json: AsJson = False,
) -> None:
    """Verify the checksums of a checkpoint's files, then show the checkpoint's step, values and tensors.

    Example: ascend-parallel checkpoint show checkpoints
    """
    needs_sharding("checkpoint")
    from ascend_parallel.training.checkpoint import CheckpointError, CheckpointReader, steps

    with errors("checkpoint", CheckpointError), progress_console(as_json).status("comparing checksums"):
        saved = CheckpointReader.open(path, step)
        description = _as_dict(saved, steps(path))
    if as_json:
        typer.echo(json.dumps(description, indent=1))
        return
    console(highlight=False).print(_tree(description, full))


@app.command(cls=Command, name="convert")
def convert_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a Megatron-core directory, or a .safetensors file.")],
    out: Annotated[Path, typer.Argument(help="The file to write; a folder with --to dcp.")],
    to: Annotated[str, typer.Option(help="safetensors, torch or dcp.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"Dtype of the written model: {', '.join(DTYPES)}; default: unchanged.")
    ] = None,
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format.

    safetensors: the full model; torch: the whole checkpoint for torch.load; dcp: the whole checkpoint as dcp.

    Examples:

      ascend-parallel checkpoint convert checkpoints model.safetensors --to safetensors --dtype bfloat16

      ascend-parallel checkpoint convert iter_0001000 checkpoints --to dcp
    """
    needs_sharding("checkpoint")
    from ascend_parallel.training.checkpoint import CheckpointError
    from ascend_parallel.training.checkpoint.convert import FORMATS, convert, open_source

    with errors("checkpoint", CheckpointError):
        form = lookup("--to", to, {name: name for name in FORMATS})
        target = None if dtype is None else dtype_of(dtype)
        source = open_source(path, step)
        with _progress("converting", len(source.kinds), as_json) as progress:
            written = convert(source, out, form, target, progress)
    typer.echo(json.dumps({"written": str(written)}) if as_json else f"written: {written}")


@app.command(cls=Command)
def diff(
    first: Annotated[Path, typer.Argument(help="A checkpoint, a Megatron-core directory, or a .safetensors file.")],
    second: Annotated[Path, typer.Argument(help="A second checkpoint of any of these formats.")],
    full: Full = False,
    as_json: AsJson = False,
) -> None:
    """Compare names, shapes, dtypes, elements and values of two checkpoints; exits with 1 if they differ.

    Example: ascend-parallel checkpoint diff checkpoints/step-00000010 checkpoints/step-00000020
    """
    needs_sharding("checkpoint")
    from ascend_parallel.training.checkpoint import CheckpointError
    from ascend_parallel.training.checkpoint.convert import compare, open_source

    with errors("checkpoint", CheckpointError):
        left, right = (open_source(path) for path in (first, second))
        with _progress("comparing", len(left.kinds), as_json) as progress:
            differences = list(compare(left, right, progress))
    if as_json:
        found = [{"name": name, "differs": how} for name, how in differences]
        typer.echo(json.dumps({"differences": found}, indent=1))
    elif not differences:
        typer.echo(f"{len(left.kinds)} tensors and all values are the same")
    else:
        table = Table("name", "differs", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for row in fold([name for name, _ in differences], [how for _, how in differences], full=full):
            table.add_row(f"{row.label}{row.times}", differences[row.first][1])
        console(highlight=False).print(table)
    if differences:
        raise typer.Exit(1)


@contextmanager
def _progress(title: str, count: int, as_json: bool) -> Iterator[Callable[[str], object]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress_console(as_json), transient=True) as shown:
        task = shown.add_task(title, total=count)
        yield lambda name: shown.advance(task)


def _as_dict(saved: CheckpointReader, all_steps: list[int]) -> dict[str, Any]:
    about = {name: saved.manifest[name] for name in ("step", "ranks", "torch", "ascend_parallel")}
    tensors = {}
    for name, (shape, dtype) in saved.kinds.items():
        boxes = saved.shard_bounds(name)
        tensors[name] = {
            "shape": list(shape),
            "dtype": dtype_name(dtype),
            "bytes": prod(shape) * dtype.itemsize,
            "boxes": [{"offsets": list(at), "sizes": list(sizes)} for at, sizes in boxes],
        }
    values = {name: repr(value) for name, value in saved.values.items()}
    return {"path": str(saved.path), **about, "steps": all_steps, "values": values, "tensors": tensors}


def _tree(description: dict[str, Any], full: bool) -> Tree:
    total = sum(tensor["bytes"] for tensor in description["tensors"].values())
    tree = Tree(
        f"[bold]{description['path']}[/]  step {description['step']}, ranks: {description['ranks']}, {size_of(total)}"
    )
    if len(description["steps"]) > 1:
        tree.add(f"steps here: {', '.join(map(str, description['steps']))}")
    values = tree.add("values")
    for name, value in description["values"].items():
        values.add(f"{name} = {value}", style="cyan")
    for space in ("model", "optimizer"):
        names = [name for name in description["tensors"] if name.startswith(f"{space}.")]
        bytes_ = sum(description["tensors"][name]["bytes"] for name in names)
        branch = tree.add(f"{space}: {len(names)} tensors, {size_of(bytes_)}")
        table = Table("tensor", "shape", "dtype", "size", "written in", box=box.SIMPLE, padding=(0, 1, 0, 0))
        cells = [_cells(description["tensors"][name]) for name in names]
        for row in fold([name.removeprefix(f"{space}.") for name in names], cells, full=full):
            table.add_row(f"{row.label}{row.times}", *cells[row.first])
        if names:
            branch.add(table)
    return tree


def _cells(tensor: dict[str, Any]) -> tuple[str, ...]:
    """Return the shape, dtype, size and parts of a tensor."""
    shape = " x ".join(map(str, tensor["shape"])) or "scalar"
    return shape, tensor["dtype"], size_of(tensor["bytes"]), _cut(tensor["boxes"])


def _cut(boxes: list[dict[str, list[int]]]) -> str:
    """Return the number of boxes of a tensor by dimension: "1 shard" or "2 x 4 shards"."""
    starts = [len({entry["offsets"][dim] for entry in boxes}) for dim in range(len(boxes[0]["offsets"]))]
    return "1 shard" if len(boxes) == 1 else f"{' x '.join(map(str, starts))} shards"
