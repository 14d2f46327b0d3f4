"""``ascend-parallel try``: does overlap help a launch of the user's own?"""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from ascend_parallel.cli.output import errors, progress_console

FEWEST, MOST = 6, 10_000
DAY = 86_400


def try_overlap(
    launch: Annotated[list[str], typer.Argument(help="Your launch, behind --: torchrun ... train.py ...")],
    steps: Annotated[
        int, typer.Option(min=FEWEST, max=MOST, help="Steps of the optimizer in each run; the first 3 are not timed.")
    ] = 15,
    chunks: Annotated[str, typer.Option(help="COC_PARALLEL_NUM of the overlapped runs.")] = "auto",
    limit: Annotated[float, typer.Option(min=1, max=DAY, help="Seconds that each run may take.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; milliseconds.")] = False,
) -> None:
    """Run your own launch for a few steps, plain and overlapped, and say whether overlap helps.

    Nothing of the program is changed. Each run ends behind its last step, without the program's own ending; what it
    writes before, such as a checkpoint in each step, it writes. Three runs in turn, on one host: plain, overlapped, and
    overlapped with a record of what stayed exposed. Exits with 1 if a run fails.

    Example:

      ascend-parallel try -- torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8
    """
    from ascend_parallel.diagnostics.trial import TrialError
    from ascend_parallel.diagnostics.trial import try_overlap as compared
    from ascend_parallel.settings import Settings
    from ascend_parallel.text import parse_int, shown

    with errors("try"), progress_console(as_json).status("starting") as status:
        if math.isnan(limit):  # passes the parser's bounds
            raise ValueError(f"--limit {limit}: give seconds from 1 to {DAY}")
        if chunks != "auto":
            number = parse_int(chunks)
            if number is None:
                raise ValueError(f"--chunks {shown(chunks)}: give auto, or a whole number")
            Settings(num_chunks=number)
        try:
            result = compared(launch, steps=steps, limit=limit, chunks=chunks, progress=status.update)
        except TrialError as error:
            typer.echo(f"try: {error}", err=True)
            raise typer.Exit(1) from error
    typer.echo(json.dumps(result.as_dict(), indent=2) if as_json else "\n".join(result.lines()))
