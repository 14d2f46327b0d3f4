"""``ascend-parallel strategy``: plan a training of a model by a strategy, without processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ascend_parallel.cli.building import build_model
from ascend_parallel.cli.output import errors


def strategy(
    model: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Function that returns (model, batch).")],
    config: Annotated[Path, typer.Option(help="TOML file with the strategy.")],
    operators: Annotated[bool, typer.Option("--operators", help="Also print the layout of every operator.")] = False,
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
    """
    from ascend_parallel.sharding import to_html
    from ascend_parallel.training import Strategy, plan_training
    from ascend_parallel.training.explain import as_dict, explain
    from ascend_parallel.training.loss import mean_loss

    with errors("strategy", ImportError), Console(stderr=True).status("planning"):
        for option, file in (("--schedule", schedule), ("--html", html)):
            if file is not None and not file.absolute().parent.is_dir():
                raise ValueError(f"{option} {file}: there is no folder {file.absolute().parent}")
        requested = Strategy.from_toml(config)
        if schedule is not None and requested.pipeline.degree == 1:
            raise ValueError(f"--schedule {schedule}: {config} has no pipeline")
        built, batch, loss = build_model(model, with_loss=True)
        planned = plan_training(requested, built, batch, loss or mean_loss)
        text = json.dumps(as_dict(planned), indent=1) if as_json else explain(planned, operators)
    if schedule is not None:
        schedule.write_text(requested.pipeline.svg(), encoding="utf-8")
    if html is not None:
        html.write_text(to_html(planned.plan), encoding="utf-8")
    typer.echo(text)
    if planned.stages and not as_json:
        typer.echo(f"\n{requested.pipeline}")
