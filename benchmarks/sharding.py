"""Time a step of an MLP block with residual and norm: sharded by a plan, by DTensor, and Megatron-core's own layers.

    python benchmarks/sharding.py --link 1gbit       about a minute; needs root for the link
    python benchmarks/sharding.py                    over the loopback

Two blocks x + down(gelu(up(norm(x)))), forward and backward, fp32, tensor-parallel without sequence parallelism:
each block has an all-reduce in forward and in backward. Every round runs all variants in random order.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.patches.megatron.testing import end_model_parallel, megatron_on_cpu, start_model_parallel
from ascend_parallel.sharding import ProcessMesh, parallelize, propagate, trace
from ascend_parallel.tuning.launch.link import LinkError, shaped_link
from ascend_parallel.tuning.launch.ranks import Job, RankError, begin_rank, deliver, run_ranks

RANKS, ROWS, HIDDEN, WIDE, BLOCKS = 2, 1024, 512, 2048, 2
STRATEGIES = {
    "*.up": ([None, ("mp", 1)], None),
    "*.down": ([None, (1, "mp")], None),
    "*:add": (None, [[Replicate()]]),
}
RedistributeStep = Callable[[], float]


class Block(nn.Module):
    """Norm, MLP, residual."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them on ``[S, 1, H]``."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MegatronBlock(Block):
    """The block with Megatron-core's layers."""

    def __init__(self) -> None:
        """Replace the linear layers."""
        super().__init__()
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        config = ModelParallelConfig(
            tensor_model_parallel_size=RANKS, use_cpu_initialization=True, gradient_accumulation_fusion=False
        )
        options = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
        self.up = ColumnParallelLinear(HIDDEN, WIDE, gather_output=False, **options)
        self.down = RowParallelLinear(WIDE, HIDDEN, input_is_parallel=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers, which also return a bias."""
        return x + self.down(F.gelu(self.up(self.norm(x))[0]))[0]


def main() -> int:
    """Read the command line, measure, print; as a rank, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--link", metavar="RATE", help="between the ranks, such as 1gbit (needs root)")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--chunks", type=int, default=4)
    options = parser.parse_args()
    link = shaped_link(options.link, RANKS) if options.link else nullcontext([])
    with link as ends, Console(stderr=True).status("measuring") as status:
        job = Job(
            program=(str(Path(__file__)),),
            arguments={"rounds": options.rounds, "chunks": options.chunks, "limit": 300},
            ranks=RANKS,
            limit=300,
            ends=ends,
        )
        found = run_ranks(job, lambda line: status.update(line))
    plain = found["times"]["Megatron-core"]
    print("| | ms | Megatron-core / it | matmuls overlapped |\n|---|---|---|---|")
    for name, times in found["times"].items():
        gain = median(theirs / ours for theirs, ours in zip(plain, times, strict=True))
        print(f"| {name} | {1e3 * median(times):.1f} | {gain:.2f} | {found['overlapped'].get(name, 0)} |")
    return 0


def rank() -> None:
    """Time every variant on this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["limit"]))
    with megatron_on_cpu():
        start_model_parallel(RANKS)
        models, overlapped = variants(job["chunks"])
        times = {name: [] for name in models}
        x = torch.randn(ROWS, 1, HIDDEN)
        for index in range(job["rounds"] + 2):
            order = list(models)
            random.Random(index).shuffle(order)
            for name in order:
                took = step(models[name], x)
                if index >= 2:
                    times[name].append(took)
        end_model_parallel()
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    deliver({"times": dict(zip(times, slowest.tolist(), strict=True)), "overlapped": overlapped})
    dist.destroy_process_group()


def variants(chunks: int) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """Return all variants of the blocks, and the number of overlapped operators."""
    torch.manual_seed(1)
    whole = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    mesh = ProcessMesh(list(range(RANKS)), ["mp"])
    plan = propagate(trace(whole, (torch.zeros(ROWS, 1, HIDDEN),)), mesh, STRATEGIES)
    apart = parallelize(whole, plan, overlap=False, static=True)
    beside = parallelize(whole, plan, settings=Settings(num_chunks=chunks), static=True)
    styles: dict[str, Any] = {}
    for index in range(BLOCKS):
        styles |= {f"{index}.up": ColwiseParallel(), f"{index}.down": RowwiseParallel()}
    dtensor = parallelize_module(
        nn.Sequential(*(Block() for _ in range(BLOCKS))), init_device_mesh("cpu", (RANKS,)), styles
    )
    models = {
        "Megatron-core": nn.Sequential(*(MegatronBlock() for _ in range(BLOCKS))),
        "DTensor": dtensor,
        "plan, not overlapped": apart,
        f"plan, overlapped in {chunks} chunks": beside,
    }
    return models, {f"plan, overlapped in {chunks} chunks": sum(bool(fused.operator) for fused in beside.fused)}


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Time one forward and backward."""
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    model(x).square().mean().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    try:
        sys.exit(rank() if sys.argv[-1].endswith("job.json") else main())
    except (LinkError, ValueError) as error:
        sys.exit(f"sharding.py: {error}")
    except RankError as error:
        sys.exit(f"sharding.py: {error}")
