"""``ascend-parallel propagate`` and ``strategy``: plan layouts, or a training, of a model without a device."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_parallel.cli.options import MINDFORMERS, MOST_RANKS, MOST_ROWS
from ascend_parallel.cli.output import errors, needs_file, needs_sharding, progress_console
from ascend_parallel.text import nearest, parse_int, shown
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE

if TYPE_CHECKING:
    import torch

MOST_BYTES = 1e18
HARDWARE = "Hardware of the costs: a name (ascend-parallel predict --list), or a TOML file of your own numbers."


def propagate(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="Function that returns (model, arguments of its forward).")
    ],
    mesh: Annotated[str, typer.Option(help="Names and sizes of the mesh dimensions, such as dp=2,mp=4.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with strategies.")] = None,
    objective: Annotated[
        str,
        typer.Option(help="Cost to minimise: time (redistribution and computation) or redistribution (as published)."),
    ] = "time",
    semi_auto: Annotated[
        str | None,
        typer.Option(
            metavar="DIM", help="Shard nodes without a strategy along this mesh dimension, or replicate them."
        ),
    ] = None,
    data_dim: Annotated[
        str | None, typer.Option(metavar="DIM", help="The mesh dimension that cuts the batch, and no weight.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of a rank in a training step, such as 32e9 or 32GB.")
    ] = None,
    hardware: Annotated[str, typer.Option(help=HARDWARE)] = DEFAULT_HARDWARE,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the graph, coloured by layout.")] = None,
    advice: Annotated[
        bool, typer.Option("--advise", help="A few operators to configure, with reasons and costs.")
    ] = False,
    instructions: Annotated[
        bool,
        typer.Option(help="Print a rank's instructions, with the bytes that each allocates and frees."),
    ] = False,
    rank: Annotated[int, typer.Option(min=0, max=MOST_RANKS, help="For --instructions: the rank.")] = 0,
    brief: Annotated[bool, typer.Option(help="Print only the summary of the plan.")] = False,
    full: Annotated[
        bool, typer.Option(help="Show every repeated layer; with --advise all operators that a principle names.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds and bytes.")] = False,
) -> None:
    """Plan the sharding of a model from the strategies of a few operators, and explain the plan.

    The function is called without arguments under torch.device("meta"), so tensors take no memory.

    Examples:

      ascend-parallel propagate examples/sharding/llama.py:small --mesh mp=8 --config examples/sharding/llama.toml

      ascend-parallel propagate my_models:llama_70b --mesh dp=128,mp=8 --brief

      ascend-parallel propagate examples/sharding/llama.py:small --mesh mp=2 --instructions --rank 1

      ascend-parallel propagate my_models:llama_70b --mesh dp=2,mp=8 --advise

      ascend-parallel propagate my_models:llama_70b --mesh dp=8,mp=8 --semi-auto dp --memory-limit 64GB
    """
    needs_sharding("propagate")
    import torch

    from ascend_parallel.sharding import advise, trace
    from ascend_parallel.sharding import propagate as plan_layouts
    from ascend_parallel.sharding.mesh import ProcessMesh
    from ascend_parallel.sharding.planner.annotate import annotated, read_strategies
    from ascend_parallel.sharding.visualize.explain import as_dict, explain, summary
    from ascend_parallel.sharding.visualize.instructions import instructions_as_text, list_instructions
    from ascend_parallel.sharding.visualize.page import to_html

    with errors("propagate", ImportError, ArithmeticError), progress_console(as_json).status("tracing") as status:
        if html is not None:
            needs_file("--html", html)
        names, sizes = _mesh(mesh)
        limit = None if memory_limit is None else bytes_of(memory_limit)
        if advice and (semi_auto or limit or config or instructions):
            raise ValueError(
                "--advise compares automatic plans: leave out --semi-auto, --memory-limit, --config and --instructions"
            )
        process_mesh = ProcessMesh(torch.arange(prod(sizes)).view(sizes).tolist(), names)
        strategies = {} if config is None else read_strategies(config)
        built, args, kwargs = build_model(model)
        if advice:
            found = advise(built, args, process_mesh, kwargs, hardware, data_dim, status.update)
            if html is not None:
                html.write_text(to_html(found.plan, found), encoding="utf-8")
            typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else found.text(full=full))
            return
        graph = trace(built, args, kwargs)
        status.update(f"propagating over {len(graph.nodes)} nodes")
        plan = plan_layouts(
            graph,
            process_mesh,
            {**annotated(built), **strategies},
            objective=objective,
            semi_auto=semi_auto,
            data_dim=data_dim,
            memory_limit=limit,
            hardware=hardware,
        )
        if html is not None:
            status.update("drawing the page")
            html.write_text(to_html(plan), encoding="utf-8")
        status.update("explaining the plan")
        listed = list_instructions(plan, rank) if instructions else []
        if as_json:
            more = {"instructions": [vars(each) for each in listed]} if instructions else {}
            text = json.dumps(as_dict(plan) | more, indent=1)
        elif instructions:
            text = instructions_as_text(listed)
        else:
            text = "\n".join(summary(plan)) if brief else explain(plan, full=full)
    typer.echo(text)


def _mesh(text: str) -> tuple[list[str], list[int]]:
    names, sizes = [], []
    for part in text.split(","):
        name, _, size = part.partition("=")
        names.append(name)
        sizes.append(parse_int(size) or 0)
    if not all(names) or min(sizes) < 1:
        raise ValueError(f"--mesh {shown(text)}: give names and sizes of at least 1, such as dp=2,mp=4")
    if len(set(names)) < len(names):
        raise ValueError(f"--mesh {shown(text)}: give each name once, such as dp=2,mp=4")
    if prod(sizes) > MOST_RANKS:
        raise ValueError(f"--mesh {shown(text)}: has {prod(sizes)} ranks; give at most {MOST_RANKS}")
    return names, sizes


def bytes_of(text: str, option: str = "--memory-limit") -> float:
    """Return the bytes of a text such as 32e9, 32GB or 30GiB; errors name `option`."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kKMGT]?i?B)?\s*", text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    unit = match[2] or "B" if match else "B"
    base = 1024 if "i" in unit else 1000
    number *= base ** " KMGT".index(unit[0].upper() if unit[0] in "kKMGT" else " ")
    if not 0 < number <= MOST_BYTES:
        raise ValueError(f"{option} {shown(text)}: give bytes up to 1e18, such as 32e9, 32GB or 30GiB")
    return float(number)


def build_model(text: str, *, with_loss: bool = False) -> tuple[torch.nn.Module, tuple[Any, ...], Any]:
    """Call the named function; return the model, its arguments, and the keyword arguments or the loss."""
    import torch

    where, _, name = text.rpartition(":")
    if not where:
        raise ValueError(f"{text!r}: give a module or a .py file and a function, such as my_models:llama")
    module = _import(where)
    if not hasattr(module, name):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise ValueError(f"{where} has no {name!r}{nearest(name, functions)}".rstrip("."))
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{text} is {shown(function)}, no function: give one that returns a model and its inputs")
    try:
        with torch.device("meta"):
            returned = function()
    except Exception as error:  # the user's own function
        why = "the function is called on torch's device 'meta', whose tensors have shapes alone: it cannot load weights"
        raise ValueError(f"{text} raised {type(error).__name__}: {error}\n{why}") from error
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module)
    expected = "(model, batch) or (model, batch, loss)" if with_loss else "(model, args) or (model, args, kwargs)"
    if not fits:
        raise ValueError(f"{text} returned {type(returned).__name__}: give {expected}")
    model, args, *rest = returned
    if rest and callable(rest[0]) != with_loss:
        raise ValueError(f"{text} returned a {type(rest[0]).__name__} as the third value: give {expected}")
    if isinstance(args, torch.Tensor):
        raise ValueError(f"{text} returned a tensor as the arguments: give a tuple, such as (x,)")
    return model, tuple(args), rest[0] if rest else None


def refuse_sizes(text: str, batch: int | None, seq: int | None) -> None:
    """Refuse the options of presets beside a function."""
    for option, value in (("--batch", batch), ("--seq", seq)):
        if value is not None:
            raise ValueError(f"{option} {value}: {text} returns its batch; leave the option out")


def _built(text: str, ranks: int, batch: int | None, seq: int | None) -> tuple[torch.nn.Module, tuple[Any, ...], Any]:
    """Return model, batch and loss of a function, or of a preset as plan-training plans it for so many ranks."""
    from ascend_parallel.training.degrees.presets import built_preset, preset_of

    if ":" in text:
        refuse_sizes(text, batch, seq)
        return build_model(text, with_loss=True)
    return *built_preset(*preset_of(text, ranks, seq, batch)), None


def _import(where: str) -> ModuleType:
    """Import a module or a file; raises `ValueError` or `ImportError` that names it."""
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        with _named(where):
            return importlib.import_module(where)
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"{where}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as for a script: the file may import its neighbours
    with _named(where):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Raise what the user's own module raises as a `ValueError` that names it; that there is none is its own error."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error


def strategy(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function that returns (model, batch[, loss]), a preset (predict --list), or a file of sizes.",
        ),
    ],
    config: Annotated[Path | None, typer.Option(help="TOML file with the strategy.")] = None,
    mindformers: Annotated[Path | None, typer.Option(help=MINDFORMERS)] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="With --mindformers: the path of the model's list of layers; default: layers."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="With --mindformers: ranks, if the file leaves them open.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option("--batch", min=1, max=MOST_ROWS, help="Presets: sequences of a step; default: as plan-training."),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Presets: sequence length; default: as plan-training.")
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="Also print the layout of every operator.")] = False,
    full: Annotated[bool, typer.Option(help="With --operators: show every repeated layer.")] = False,
    schedule: Annotated[Path | None, typer.Option(help="Write the pipeline schedule as SVG.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the graph, coloured by layout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds and bytes.")] = False,
) -> None:
    """Plan the training of a model by a strategy for any number of ranks, and explain the effect of each option.

    The function is called without arguments under torch.device("meta"), so tensors take no memory. The model returns
    the mean loss of the global batch, over all replicas.

    Examples:

      ascend-parallel strategy examples/strategy/train.py:planned --config examples/strategy/gpt.toml

      ascend-parallel strategy my_models:llama_70b --config 8192.toml --schedule schedule.svg

      ascend-parallel strategy llama2-70b --config llama2-70b-1024.toml --html plan.html

      ascend-parallel strategy my_models:qwen3 --mindformers pretrain_qwen3.yaml --layers model.layers
    """
    needs_sharding("strategy")
    from ascend_parallel.training import Strategy, plan_training
    from ascend_parallel.training.explain import Explanation
    from ascend_parallel.training.loss import mean_loss
    from ascend_parallel.tuning.cost_model.mindformers import read_mindformers

    with errors("strategy", ImportError, ArithmeticError), progress_console(as_json).status("planning"):
        for option, file in (("--schedule", schedule), ("--html", html)):
            if file is not None:
                needs_file(option, file)
        if (config is None) == (mindformers is None):
            given = f"; not both {config} and {mindformers}" if config else ""
            raise ValueError(f"give either --config, a strategy's TOML, or --mindformers, a YAML file{given}")
        for option, value in (("--layers", layers), ("--ranks", ranks)):
            if config is not None and value is not None:
                raise ValueError(f"{option} {value} is for --mindformers: leave it out")
        run = None
        if config is not None:
            requested = Strategy.from_toml(config)
        else:
            assert mindformers is not None
            run = read_mindformers(mindformers, ranks)
            requested = Strategy.from_dict(run.tables(layers or "layers"), str(mindformers))
        if schedule is not None and requested.pipeline.degree == 1:
            raise ValueError(f"--schedule {schedule}: {config or mindformers} has no pipeline")
        if run is not None and ":" not in model:
            rows, seq = rows or run.batch, seq or run.sequence
        built, batch, loss = _built(model, requested.ranks, rows, seq)
        planned = plan_training(requested, built, batch, loss or mean_loss)
        more = {} if run is None else {"mindformers": run.as_dict()}
        explained = Explanation(planned)
        text = json.dumps(explained.as_dict() | more, indent=1) if as_json else explained.text(operators, full=full)
        if schedule is not None:
            schedule.write_text(requested.pipeline.svg(), encoding="utf-8")
        if html is not None:
            html.write_text(explained.html(model), encoding="utf-8")
    if run is not None and not as_json:
        typer.echo(f"{run.report()}\n")
    typer.echo(text)
    if planned.stages and not as_json:
        typer.echo(f"\n{requested.pipeline}")
