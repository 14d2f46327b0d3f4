"""Time a step of an MLP block with residual and norm: sharded by a plan, by DTensor, and Megatron-core's own layers.

    python benchmarks/sharding.py --link 1gbit       about a minute
    python benchmarks/sharding.py                    over the loopback

Two blocks x + down(gelu(up(norm(x)))), forward and backward, fp32, tensor-parallel without sequence parallelism:
each block has an all-reduce in forward and in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from measuring import gain, in_turn, milliseconds, on_ranks, options_of, run, table
from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.sharding import ProcessMesh, ShardedModule, propagate, trace

RANKS, ROWS, HIDDEN, WIDE, BLOCKS = 2, 1024, 512, 2048, 2
STRATEGIES = {
    "*.up": ([None, ("mp", 1)], None),
    "*.down": ([None, (1, "mp")], None),
    "*:add": (None, [[Replicate()]]),
}


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


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=25)
    parser.add_argument("--chunks", type=int, default=4, help="default: 4")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"default: {ROWS}")
    options = parser.parse_args()
    asked = {"rounds": options.rounds, "chunks": options.chunks, "rows": options.rows}
    found = on_ranks("sharding:rank", RANKS, link=options.link, **asked)
    plain = found["times"]["Megatron-core"]
    rows = [
        [name, milliseconds(times), f"{gain(plain, times):.2f}", found["overlapped"].get(name, 0)]
        for name, times in found["times"].items()
    ]
    print(table(["", "ms", "Megatron-core / it", "matmuls overlapped"], rows))


def rank(group: dist.ProcessGroup, rounds: int, chunks: int, rows: int) -> dict[str, Any]:
    """Time every variant on this rank."""
    x = torch.randn(rows, 1, HIDDEN)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    with megatron_on_cpu():
        start_model_parallel(RANKS)
        models, overlapped = variants(chunks, rows)
        times = in_turn({name: lambda model=model: step(model) for name, model in models.items()}, rounds)
        end_model_parallel()
    return {"times": times, "overlapped": overlapped}


def variants(chunks: int, rows: int) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """Return all variants of the blocks, and the number of overlapped operators."""
    torch.manual_seed(1)
    whole = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    mesh = ProcessMesh(list(range(RANKS)), ["mp"])
    plan = propagate(trace(whole, (torch.zeros(rows, 1, HIDDEN),)), mesh, STRATEGIES, objective="redistribution")
    apart = ShardedModule(whole, plan, overlap=False)
    beside = ShardedModule(whole, plan, settings=Settings(num_chunks=chunks))
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


if __name__ == "__main__":
    run(main)
