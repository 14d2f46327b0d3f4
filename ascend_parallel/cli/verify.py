"""``ascend-parallel verify``: a run whose layers are checked against the originals."""

from __future__ import annotations

import typer

from ascend_parallel.settings import RAREST


def verify(
    script: str = typer.Argument(help="The training script, followed by its own arguments; with -m a module."),
    every: int = typer.Option(
        1, "--every", metavar="N", min=1, max=RAREST, help="Check the first and then every N-th call (COC_VERIFY)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Rank 0 prints what was found as a last line of JSON."),
) -> None:
    """Run a training script and check its layers against Megatron-core's own: ascend-parallel verify --help.

    Example: COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 -m ascend_parallel verify train.py
    """
    raise AssertionError("ascend_parallel.__main__ runs this without importing the command line")
