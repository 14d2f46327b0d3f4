"""Time whole training steps of a real GPT (megatron-core), with and without overlap.

    python benchmarks/training.py --link 1gbit      about four minutes; needs root for the link
    python benchmarks/training.py                   over the loopback, where there is little to hide

Forward, backward and the optimizer's step, fp32, 2 ranks, in all-reduce mode and with sequence parallelism. Every round
runs all variants in a random order, each timed from a barrier to the slowest rank. The table has medians, and the ratio
plain / variant, paired by round, with a bootstrap interval. "first step" includes auto's search for chunks.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import ascend_parallel
from ascend_parallel.patches.megatron.testing import (
    finalize_gradients,
    megatron_on_cpu,
    next_token_loss,
    small_gpt,
    start_model_parallel,
    stop_model_parallel,
)
from ascend_parallel.tuning.launch.link import LinkError, shaped_link
from ascend_parallel.tuning.launch.ranks import Job, RankError, begin_rank, deliver, report, run_ranks

RANKS, PLAIN = 2, "plain"


def main() -> int:
    """Read the command line, measure, print; as a rank, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--link", metavar="RATE", help="between the ranks, such as 1gbit (needs root)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", default="auto,4", help="values of COC_PARALLEL_NUM beside the plain step")
    for name, size in {"hidden": 768, "layers": 2, "seq": 512, "batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = vars(parser.parse_args())
    link = shaped_link(options["link"], RANKS) if options["link"] else nullcontext([])
    with link as ends, Console(stderr=True).status("measuring") as status:
        arguments = {**options, "limit": 1200}
        job = Job(program=(str(Path(__file__)),), arguments=arguments, ranks=RANKS, limit=1200, ends=ends)
        found = run_ranks(job, lambda line: status.update(line))
    print("| mode | COC_PARALLEL_NUM | step, ms | plain / variant | 95 % | first step, ms |\n|---|---|---|---|---|---|")
    for mode, variants in found.items():
        for name, times in variants.items():
            print(_row(mode, name, times, variants[PLAIN]))
    return 0


def _row(mode: str, name: str, times: list[float], plain: list[float]) -> str:
    pairs = [theirs / ours for theirs, ours in zip(plain[1:], times[1:], strict=True)]
    draw = random.Random(0)
    drawn = sorted(median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    ratio = f"{median(pairs):.3f} | {drawn[50]:.3f}-{drawn[-51]:.3f}" if name != PLAIN else "1 |"
    return f"| {mode} | {name} | {1e3 * median(times[1:]):.0f} | {ratio} | {1e3 * times[0]:.0f} |"


def rank() -> None:
    """Time every variant of both modes on this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["limit"]))
    found = {}
    with megatron_on_cpu():
        start_model_parallel(RANKS)
        for mode in ("all-reduce", "sequence parallel"):
            found[mode] = _mode(mode, job)
        stop_model_parallel()
    deliver(found)


def _mode(mode: str, job: dict[str, Any]) -> dict[str, list[float]]:
    sequence_parallel = mode != "all-reduce"
    shape = {"num_layers": job["layers"], "hidden": job["hidden"], "heads": 12, "seq": job["seq"], "vocab": 8192}
    model = small_gpt(**shape, sequence_parallel=sequence_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = torch.randint(8192, (job["batch"], job["seq"] + 1), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        next_token_loss(model, tokens).backward()
        finalize_gradients(model)
        optimizer.step()
        return time.perf_counter() - start

    step()  # warm-up of allocator and optimizer
    variants = _variants(job["chunks"].split(","))
    times = {name: [_with(forwards, step)] for name, forwards in variants.items()}
    for index in range(job["rounds"]):
        report(f"{mode}: round {index + 1} of {job['rounds']}")
        order = list(variants)
        random.Random(index).shuffle(order)
        for name in order:
            times[name].append(_with(variants[name], step))
    _with(variants[PLAIN], step)  # restores the plain methods
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def _variants(chunks: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return both layers' forward methods by setting, the plain methods first."""
    ascend_parallel.configure(num_chunks=1)
    variants = {PLAIN: _forwards()}
    for requested in chunks:
        ascend_parallel.configure(**({"auto": True} if requested == "auto" else {"num_chunks": int(requested)}))
        variants[requested] = _forwards()
        ascend_parallel.configure(num_chunks=1)
    return variants


def _classes() -> tuple[Any, Any]:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return ColumnParallelLinear, RowParallelLinear


def _forwards() -> tuple[Any, Any]:
    column, row = _classes()
    return column.forward, row.forward


def _with(forwards: tuple[Any, Any], step: Callable[[], float]) -> float:
    """Run a step with these methods; what a setting has found out stays with its methods."""
    for owner, forward in zip(_classes(), forwards, strict=True):
        owner.forward = forward
    return step()


if __name__ == "__main__":
    try:
        sys.exit(rank() if sys.argv[-1].endswith("job.json") else main())
    except (LinkError, RankError, ValueError) as error:
        sys.exit(f"training.py: {error}")
