"""``ascend-parallel propagate``: a layout for every tensor of a model, without a device and for meshes of any size."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ascend_parallel.planning.tables import PlanningError

MOST_RANKS = 1 << 20


def propagate(
    model: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Returns (model, arguments of its forward).")],
    mesh: Annotated[str, typer.Option(help="Names and sizes, such as dp=2,mp=4.")],
    config: Annotated[Path | None, typer.Option(help="A TOML file of strategies.")] = None,
    objective: Annotated[str, typer.Option(help="redistribution, or time: with what each rank computes.")] = "time",
    hardware: Annotated[str, typer.Option(help="Whose costs; ascend-parallel predict --list shows them.")] = "910b",
    html: Annotated[Path | None, typer.Option(help="Write a page with the graph, coloured by layout.")] = None,
    advice: Annotated[bool, typer.Option("--advise", help="Say which operators to configure, and why.")] = False,
    brief: Annotated[bool, typer.Option(help="Only what the plan comes to.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; seconds and bytes.")] = False,
) -> None:
    """Find the sharding of a model from the strategies of a few operators, and explain it.

    The function is called with no arguments while torch makes tensors without memory (the meta device).

    Examples:

      ascend-parallel propagate examples/sharding/llama.py:small --mesh mp=8 --config examples/sharding/llama.toml

      ascend-parallel propagate my_models:llama_70b --mesh dp=128,mp=8 --brief

      ascend-parallel propagate my_models:llama_70b --mesh dp=2,mp=8 --advise
    """
    from ascend_parallel.sharding import advise, trace
    from ascend_parallel.sharding import propagate as found_plan
    from ascend_parallel.sharding.mesh import ProcessMesh
    from ascend_parallel.sharding.planner.annotate import annotated, read_strategies
    from ascend_parallel.sharding.showing.explain import as_dict, summary

    with _errors(), Console(stderr=True).status("tracing") as status:
        if html is not None and not html.absolute().parent.is_dir():
            raise ValueError(f"--html {html}: there is no folder {html.absolute().parent}")
        names, sizes = _mesh(mesh)
        on = ProcessMesh(torch.arange(prod(sizes)).view(sizes).tolist(), names)
        strategies = {} if config is None else read_strategies(config)
        built, args, kwargs = _build(model)
        if advice:
            status.update("propagating with and without each operator")
            typer.echo(str(advise(built, args, on, kwargs, hardware)))
            return
        graph = trace(built, args, kwargs)
        status.update(f"propagating over {len(graph.nodes)} nodes")
        plan = found_plan(graph, on, {**annotated(built), **strategies}, objective=objective, hardware=hardware)
    if html is not None:
        html.write_text(plan.to_html(), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(as_dict(plan), indent=1))
    else:
        typer.echo("\n".join(summary(plan)) if brief else plan.explain())


@contextmanager
def _errors() -> Iterator[None]:
    """End with 2 and a line for what the user can put right."""
    try:
        yield
    except (PlanningError, ValueError, OSError, ImportError) as error:
        typer.echo(f"propagate: {error}", err=True)
        raise typer.Exit(2) from error


def _mesh(text: str) -> tuple[list[str], list[int]]:
    names, sizes = [], []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--mesh {text}: give names and sizes, such as dp=2,mp=4")
        names.append(name)
        sizes.append(int(size))
    if prod(sizes) > MOST_RANKS:
        raise ValueError(f"--mesh {text}: {prod(sizes)} ranks, of at most {MOST_RANKS}")
    return names, sizes


def _build(text: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the function that the user named."""
    where, _, name = text.rpartition(":")
    if not where:
        raise ValueError(f"{text!r}: give a module or a .py file and a function in it, such as my_models:llama")
    module = _import(where)
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name!r}")
    try:
        with torch.device("meta"):
            returned = getattr(module, name)()
    except Exception as error:  # the user's own function
        raise ValueError(f"{text} raised {type(error).__name__}: {error}") from error
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module)
    if not fits:
        raise ValueError(f"{text} returned {type(returned).__name__}: give (model, args) or (model, args, kwargs)")
    model, args, *rest = returned
    if isinstance(args, torch.Tensor):
        raise ValueError(f"{text} returned a tensor as the arguments: give a tuple, such as (x,)")
    return model, tuple(args), dict(rest[0]) if rest else {}


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"{where}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as a script finds what lies beside it
    spec.loader.exec_module(module)
    return module
