"""Time data-parallel and gathered linear layers: collectives in place, in buckets, prefetched, and DDP's.

    python benchmarks/buckets.py --link 1gbit       about a minute; needs root for the link
    python benchmarks/buckets.py                    over the loopback

Forward and backward of tanh(linear(x)), fp32, on 2 ranks. "data parallel": weights are replicated and
gradients summed. "gathered": weights are sharded as in ZeRO-3, gathered where they are read, and gradients
reduce-scattered. Every round runs all variants in random order.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ascend_parallel.sharding import ProcessMesh, parallelize, propagate, trace
from ascend_parallel.tuning.launch.link import LinkError, shaped_link
from ascend_parallel.tuning.launch.ranks import Job, RankError, begin_rank, deliver, run_ranks

RANKS, ROWS, WIDTH, LAYERS = 2, 512, 512, 8
WEIGHT = 4 * WIDTH * WIDTH


class Stack(nn.Sequential):
    """Linear layers and tanh."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squares."""
        return super().forward(x).square().mean()


def main() -> int:
    """Read the command line, measure, print; as a rank, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--link", metavar="RATE", help="between the ranks, such as 1gbit (needs root)")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    link = shaped_link(options.link, RANKS) if options.link else nullcontext([])
    with link as ends, Console(stderr=True).status("measuring") as status:
        arguments = {"rounds": options.rounds, "limit": 300}
        job = Job(program=(str(Path(__file__)),), arguments=arguments, ranks=RANKS, limit=300, ends=ends)
        found = run_ranks(job, lambda line: status.update(line))
    print("| | ms | the first of its kind / it |\n|---|---|---|")
    for name, times in found.items():
        first = found[next(other for other in found if other.partition(",")[0] == name.partition(",")[0])]
        gain = median(theirs / ours for theirs, ours in zip(first, times, strict=True))
        print(f"| {name} | {1e3 * median(times):.1f} | {gain:.2f} |")
    return 0


def rank() -> None:
    """Time every variant on this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["limit"]))
    models = variants()
    times: dict[str, list[float]] = {name: [] for name in models}
    x = torch.randn(ROWS // RANKS, WIDTH)
    for index in range(job["rounds"] + 2):
        order = list(models)
        random.Random(index).shuffle(order)
        for name in order:
            took = step(models[name], x)
            if index >= 2:
                times[name].append(took)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    deliver(dict(zip(times, slowest.tolist(), strict=True)))
    dist.destroy_process_group()


def variants() -> dict[str, nn.Module]:
    """Return all variants of the layers."""
    torch.manual_seed(1)
    whole, mesh = Stack(), ProcessMesh(list(range(RANKS)), ["dp"])
    graph = trace(whole, (torch.zeros(ROWS, WIDTH),))
    rows = dict.fromkeys(("inputs:*", "*:linear", "*:tanh"), (None, [("dp", 1)]))
    plans = {
        kind: propagate(graph, mesh, rows | {"weights:*.weight": (None, [cut])})
        for kind, cut in {"data parallel": (1, 1), "gathered": ("dp", 1)}.items()
    }
    sizes = {"each where it stands": 0, "1 MB": WEIGHT, "2 MB": 2 * WEIGHT, "25 MB": 25 << 20}
    return {
        f"{kind}, {name}": parallelize(whole, plan, static=True, bucket_bytes=size, local_inputs=True)
        for kind, plan in plans.items()
        for name, size in sizes.items()
    } | {"data parallel, torch's DDP": DistributedDataParallel(Stack(), bucket_cap_mb=2)}


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Time one forward and backward."""
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    model(x).backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    try:
        sys.exit(rank() if sys.argv[-1].endswith("job.json") else main())
    except (LinkError, RankError, ValueError) as error:
        sys.exit(f"buckets.py: {error}")
