"""A function run on a few gloo ranks of this machine: what commands do to try or measure something."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes


class LocalRanksError(RuntimeError):
    """A rank failed or did not end in time; the message says which, and what it printed last."""


def run_on_local_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, time_limit: float = 120.0
) -> list[Any]:
    """Return what ``function(group, *arguments)`` returns on each of `ranks` new gloo processes, in rank order.

    `function` stands at the top of a module, and what it takes and returns can be pickled. Each process
    has one thread. Raises `LocalRanksError` if a rank raises, or has not ended after `time_limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _serve, (ranks, folder, time_limit, function, arguments), nprocs=ranks, join=False, start_method="spawn"
        )
        end = time.monotonic() + time_limit
        try:
            while not context.join(timeout=max(end - time.monotonic(), 0.0)):
                if time.monotonic() >= end:
                    late = [rank for rank in range(ranks) if not _answer(folder, rank).exists()]
                    raise LocalRanksError(
                        f"rank {', '.join(map(str, late))} of {ranks} did not end within {time_limit:g} s"
                    )
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise LocalRanksError(_first_failure(folder, error.error_index, ranks, str(error))) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(_answer(folder, rank), weights_only=False) for rank in range(ranks)]


def _first_failure(folder: str, rank: int, ranks: int, text: str) -> str:
    """Tell of the rank that failed first: the others then fail because it is gone."""
    for file in sorted(Path(folder).glob("error-*"), key=lambda file: int(file.name.split("-")[1])):
        return f"rank {file.name.split('-')[2]} of {ranks} failed: {file.read_text().strip()}"
    return f"rank {rank} of {ranks} failed: {text.strip()}"


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"answer-{rank}"


def _serve(
    rank: int, ranks: int, folder: str, time_limit: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(ranks)
    torch.set_num_threads(1)
    limit = timedelta(seconds=time_limit)
    dist.init_process_group("gloo", f"file://{folder}/store", limit, rank=rank, world_size=ranks)
    try:
        answer = function(dist.group.WORLD, *arguments)
        dist.barrier()
        torch.save(answer, _answer(folder, rank))
    except BaseException:
        (Path(folder) / f"error-{time.monotonic_ns()}-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
