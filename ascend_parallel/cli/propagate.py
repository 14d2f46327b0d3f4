"""``ascend-parallel propagate``: plan a layout for every tensor of a model, without a device, for any mesh."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ascend_parallel.cli.building import build_model
from ascend_parallel.cli.output import errors
from ascend_parallel.text import shown, whole

MOST_RANKS, MOST_BYTES = 1 << 20, 1e18


def propagate(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="Function that returns (model, arguments of its forward).")
    ],
    mesh: Annotated[str, typer.Option(help="Names and sizes of the mesh dimensions, such as dp=2,mp=4.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with strategies.")] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="Cost to minimise: time (redistribution and computation) or redistribution (Python's default)."
        ),
    ] = "time",
    semi_auto: Annotated[
        str | None,
        typer.Option(
            metavar="DIM", help="Shard nodes without a strategy along this mesh dimension, or replicate them."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of a rank in a training step, such as 32e9 or 32GB.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Hardware of the costs; ascend-parallel predict --list shows all.")
    ] = "910b",
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the graph, coloured by layout.")] = None,
    advice: Annotated[bool, typer.Option("--advise", help="List the operators to configure, with reasons.")] = False,
    instructions: Annotated[
        bool,
        typer.Option(help="Print a rank's instructions, with the bytes that each allocates and frees."),
    ] = False,
    rank: Annotated[int, typer.Option(min=0, help="For --instructions: the rank.")] = 0,
    brief: Annotated[bool, typer.Option(help="Print only the summary of the plan.")] = False,
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
    from ascend_parallel.sharding import advise, trace
    from ascend_parallel.sharding import propagate as plan_layouts
    from ascend_parallel.sharding.mesh import ProcessMesh
    from ascend_parallel.sharding.planner.annotate import annotated, read_strategies
    from ascend_parallel.sharding.visualize.explain import as_dict, explain, summary
    from ascend_parallel.sharding.visualize.instructions import instructions_as_text, list_instructions
    from ascend_parallel.sharding.visualize.page import to_html

    with errors("propagate", ImportError), Console(stderr=True).status("tracing") as status:
        if html is not None and not html.absolute().parent.is_dir():
            raise ValueError(f"--html {html}: there is no folder {html.absolute().parent}")
        names, sizes = _mesh(mesh)
        limit = None if memory_limit is None else bytes_of(memory_limit)
        if advice and (semi_auto or limit):
            raise ValueError("--advise compares automatic plans: leave out --semi-auto and --memory-limit")
        process_mesh = ProcessMesh(torch.arange(prod(sizes)).view(sizes).tolist(), names)
        strategies = {} if config is None else read_strategies(config)
        built, args, kwargs = build_model(model)
        if advice:
            status.update("propagating with and without each operator")
            typer.echo(str(advise(built, args, process_mesh, kwargs, hardware)))
            return
        graph = trace(built, args, kwargs)
        status.update(f"propagating over {len(graph.nodes)} nodes")
        plan = plan_layouts(
            graph,
            process_mesh,
            {**annotated(built), **strategies},
            objective=objective,
            semi_auto=semi_auto,
            memory_limit=limit,
            hardware=hardware,
        )
        listed = list_instructions(plan, rank) if instructions else []
    if html is not None:
        html.write_text(to_html(plan), encoding="utf-8")
    if as_json:
        more = {"instructions": [vars(each) for each in listed]} if instructions else {}
        typer.echo(json.dumps(as_dict(plan) | more, indent=1))
    elif instructions:
        typer.echo(instructions_as_text(listed))
    else:
        typer.echo("\n".join(summary(plan)) if brief else explain(plan))


def _mesh(text: str) -> tuple[list[str], list[int]]:
    names, sizes = [], []
    for part in text.split(","):
        name, _, size = part.partition("=")
        names.append(name)
        sizes.append(whole(size) or 0)
    if not all(names) or min(sizes) < 1:
        raise ValueError(f"--mesh {shown(text)}: give names and sizes, such as dp=2,mp=4")
    if prod(sizes) > MOST_RANKS:
        raise ValueError(f"--mesh {shown(text)}: has {prod(sizes)} ranks; give at most {MOST_RANKS}")
    return names, sizes


def bytes_of(text: str) -> float:
    """Return the bytes of a text such as 32e9, 32GB or 30GiB."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?i?B)?\s*", text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    unit = match[2] or "B" if match else "B"
    base = 1024 if "i" in unit else 1000
    number *= base ** " kMGT".index(unit[0] if unit[0] in "kMGT" else " ")
    if not 0 < number <= MOST_BYTES:
        raise ValueError(f"--memory-limit {shown(text)}: give bytes up to 1e18, such as 32e9, 32GB or 30GiB")
    return float(number)
