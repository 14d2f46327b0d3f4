"""``ascend-parallel try``: does overlap help a launch of the user's own?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from ascend_parallel.cli.output import errors, progress_lines

FEWEST, MOST = 6, 10_000
DAY = 86_400


def try_overlap(
    launch: Annotated[
        list[str], typer.Argument(help="Your launch, behind --, as in: ascend-parallel try -- torchrun train.py")
    ],
    steps: Annotated[
        int, typer.Option(min=FEWEST, max=MOST, help="Steps of the optimizer in each run; the first 3 are not timed.")
    ] = 15,
    chunks: Annotated[str, typer.Option(help="COC_PARALLEL_NUM of the overlapped runs.")] = "auto",
    limit: Annotated[float, typer.Option(min=1, max=DAY, help="Seconds that each run may take.")] = 600,
    emulated: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="On emulated NPUs by a virtual clock: 910B1, 910_93, 950 (contrib/emulated_ascend)."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="With --emulated: a factor on the host's time, or probe.")] = "1",
    lanes: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --emulated: write the lanes of both runs, for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts; milliseconds.")] = False,
) -> None:
    """Run your own launch for a few steps, plain and overlapped, and say whether overlap helps.

    Nothing of the program is changed. Each run ends behind its last step, without the program's own ending; what it
    writes before, such as a checkpoint in each step, it writes. Three runs in turn, on one host: plain, overlapped, and
    overlapped with a record of what stayed exposed. Exits with 1 if a run fails; the first two are compared also where
    the third fails. Progress is on stderr.

    Example:

      ascend-parallel try -- torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8

    With --emulated it needs no card: the launch runs on the real torch_npu over an emulated CANN, plain and overlapped,
    with the times of a table of devices. It says where a step's time goes, not what numbers a model gets.

      ascend-parallel try --emulated 910B1 -- torchrun --nproc-per-node 2 train.py
    """
    if emulated is not None:
        return _emulated(launch, emulated, steps, chunks, limit, host, lanes, as_json)
    from ascend_parallel.diagnostics.trial import TrialError, TrialResult
    from ascend_parallel.diagnostics.trial import try_overlap as compared

    found: list[TrialResult] = []
    with errors("try"):
        _check(chunks, limit)
        try:
            with progress_lines(as_json) as progress:
                done = compared(
                    launch, steps=steps, limit=limit, chunks=chunks, progress=progress, on_compared=found.append
                )
            found.append(done)
        except TrialError as error:
            typer.echo(f"try: {error}", err=True)
            raise typer.Exit(1) from error
        finally:  # also where the third run was cut off
            for result in found[-1:]:
                typer.echo(json.dumps(result.as_dict(), indent=2) if as_json else "\n".join(result.lines()))
    if done.unrecorded:
        typer.echo(f"try: {done.unrecorded}", err=True)
        raise typer.Exit(1)


def _check(chunks: str, limit: float) -> None:
    """Refuse values that the parser passes."""
    from ascend_parallel.settings import Settings
    from ascend_parallel.text import parse_int, shown

    if math.isnan(limit):
        raise ValueError(f"--limit {limit}: give seconds from 1 to {DAY}")
    if chunks != "auto":
        number = parse_int(chunks)
        if number is None:
            raise ValueError(f"--chunks {shown(chunks)}: give auto, or a whole number")
        Settings(num_chunks=number)


def _emulated(
    launch: list[str],
    device: str,
    steps: int,
    chunks: str,
    limit: float,
    host: str,
    lanes: Path | None,
    as_json: bool,
) -> None:
    """Compare on emulated devices."""
    from ascend_parallel.diagnostics.emulated_trial import try_emulated
    from ascend_parallel.diagnostics.trial import TrialError

    with errors("try"):
        _check(chunks, limit)
        try:
            with progress_lines(as_json) as progress:
                result = try_emulated(
                    launch,
                    device,
                    steps=steps,
                    chunks=chunks,
                    limit=limit,
                    host=host,
                    lanes=lanes,
                    progress=progress,
                )
        except TrialError as error:
            typer.echo(f"try: {error}", err=True)
            raise typer.Exit(1) from error
        typer.echo(json.dumps(result.as_dict(), indent=2) if as_json else "\n".join(result.lines()))
