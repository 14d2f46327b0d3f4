"""``ascend-parallel verify``: run a script and compare its layers with the originals."""

from __future__ import annotations

import typer

from ascend_parallel.settings import RAREST


def verify(
    script: str = typer.Argument(help="The training script, or a module with -m, followed by its arguments."),
    every: int = typer.Option(
        1, "--every", metavar="N", min=1, max=RAREST, help="Check the first and then every N-th call (COC_VERIFY)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Rank 0 prints the results as a last line of JSON."),
) -> None:
    """Run a training script and compare its layers with Megatron-core's own: ascend-parallel verify --help.

    Example: COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 -m ascend_parallel verify train.py
    """
    raise AssertionError("ascend_parallel.__main__ runs this without importing the command line")
