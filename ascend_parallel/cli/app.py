"""The commands of `ascend-parallel`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from ascend_parallel.cli.audit import audit
from ascend_parallel.cli.bench import bench, tune
from ascend_parallel.cli.checkpoint import app as checkpoint
from ascend_parallel.cli.commands import Command, Commands, PlainCommand
from ascend_parallel.cli.doctor import doctor
from ascend_parallel.cli.explain import explain
from ascend_parallel.cli.options import RAREST
from ascend_parallel.cli.plan_training import plan_training
from ascend_parallel.cli.predict import EXAMPLES, predict
from ascend_parallel.cli.propagate import propagate, strategy
from ascend_parallel.cli.report.command import report
from ascend_parallel.cli.timeline import timeline
from ascend_parallel.cli.try_overlap import try_overlap
from ascend_parallel.version import __version__

if TYPE_CHECKING:
    from ascend_parallel.patch_control import Status

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Overlap the matmul and the collective of tensor-parallel linear layers.",
)
app.command(cls=Command)(doctor)
app.command("try", cls=Command)(try_overlap)
app.command(cls=PlainCommand)(audit)
app.command(cls=Command)(explain)
app.command(cls=PlainCommand, help=EXAMPLES)(predict)
app.command(cls=Command)(bench)
app.command(cls=Command)(tune)
app.command(cls=Command)(report)
app.command(cls=PlainCommand)(timeline)
app.command(cls=Command)(propagate)
app.command(cls=Command)(strategy)
app.command(cls=Command)(plan_training)
app.add_typer(checkpoint, name="checkpoint")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ascend_parallel {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Overlap the matmul and the collective of tensor-parallel linear layers."""


@app.command(cls=Command)
def status(as_json: bool = typer.Option(False, "--json", help="Print JSON, for scripts.")) -> None:
    """Show the settings of the environment, and the methods that they replace.

    Exits with 1 if the variables would not take effect in a training, as doctor does.

    Example: COC_PARALLEL_NUM=4 ascend-parallel status
    """
    from ascend_parallel.diagnostics.doctor import BAD, examine_request
    from ascend_parallel.patch_control import CONTROL

    if CONTROL.refused is not None:
        typer.echo(f"ascend-parallel: {CONTROL.refused}", err=True)
        raise typer.Exit(2)
    bad = [finding for finding in examine_request(CONTROL) if finding.verdict == BAD]
    current = CONTROL.status()
    if as_json:
        typer.echo(json.dumps(current.as_dict(), indent=2))
    else:
        _show(current, {finding.found for finding in bad})
    for finding in bad:
        typer.echo(f"{finding.name}: {finding.found}" + (f"; {finding.advice}" if finding.advice else ""), err=True)
    raise typer.Exit(1 if bad else 0)


def _show(current: Status, bad: set[str]) -> None:
    """Print the status, without the findings of `bad`, which `status` prints to stderr."""
    from ascend_parallel.overlap.choices import overlap_in_words
    from ascend_parallel.settings import option_name

    console = Console()
    console.print(f"ascend_parallel {current.version}: {current.state}", markup=False, highlight=False)
    if not bad:
        console.print(f"overlap is {overlap_in_words(current.settings)}", markup=False, highlight=False)
    table = Table()
    table.add_column("variable, or key of COC_CONFIG")
    table.add_column("value")
    for name, value in current.settings.as_dict().items():
        table.add_row(option_name(name), str(value))
    console.print(table)
    for patch in current.patches:
        console.print(f"{'replaced' if patch.applied else 'untouched'}  {patch.target}: {patch.reason}", markup=False)
    if current.region:
        console.print(f"regions: {current.region}", markup=False, highlight=False)
    for kernel, state in current.kernels.items():
        console.print(f"kernel {kernel}: {state}", markup=False)
    for note in current.notes:
        if note not in bad:
            console.print(f"note: {note}", markup=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    script: str = typer.Argument(help="The training script, or a module with -m, followed by its arguments."),
) -> None:
    """Run a training script with the overlap of COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL.

    Needed where TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set. Start it like the training, on every rank.

    Examples:

      COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel run pretrain_gpt.py --num-layers 32

      COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel run -m my_package.train
    """
    raise AssertionError("ascend_parallel.__main__ runs this without importing the command line")


@app.command(cls=Command)
def verify(
    script: str = typer.Argument(help="The training script, or a module with -m, followed by its arguments."),
    every: int = typer.Option(
        1, "--every", metavar="N", min=1, max=RAREST, help="Check the first and then every N-th call (COC_VERIFY)."
    ),
    degrees: str | None = typer.Option(
        None, "--degrees", metavar="1,2,4", help="Start the script at these degrees instead, and compare their bits."
    ),
    against_server: str | None = typer.Option(
        None, "--against-server", metavar="CHECKPOINT", help="Compare the logprobs of vLLM and transformers instead."
    ),
    prompts: str | None = typer.Option(
        None, "--prompts", metavar="FILE", help="For --against-server: a list of token ids in JSON on each line."
    ),
    tp: int = typer.Option(1, "--tp", metavar="RANKS", help="For --against-server: the ranks of transformers."),
    server_tp: int = typer.Option(1, "--server-tp", metavar="RANKS", help="For --against-server: the ranks of vLLM."),
    new: int = typer.Option(16, "--new", metavar="TOKENS", help="For --against-server: tokens that vLLM adds."),
    dtype: str = typer.Option("float32", "--dtype", help="For --against-server: float32 or bfloat16."),
    as_json: bool = typer.Option(False, "--json", help="Rank 0 prints the results as a last line of JSON."),
) -> None:
    """Run a training script with overlap, and compare its layers with the framework's own.

    Exits with 0 if at least one call was checked and no error exceeded its limit, otherwise with 1. Rank 0 logs a table
    of the largest errors. Start it like the training, on every rank.

    Example:

      COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel verify --every 10 train.py --layers 32

      ascend-parallel verify --degrees 1,2,4 train.py --layers 4

      ascend-parallel verify --against-server CHECKPOINT --prompts prompts.jsonl --tp 2 --server-tp 4
    """
    raise AssertionError("ascend_parallel.__main__ runs this without importing the command line")
