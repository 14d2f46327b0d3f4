"""Time the host's part of a training step of MLP blocks: plain torch, by hand, planned, and planned but run eagerly.

    python benchmarks/host_time.py                  a table with and without dropout, on one rank; half a minute
    python benchmarks/host_time.py --ranks 2        the same, tensor parallel over 2 ranks
    python benchmarks/host_time.py --segments       also with compile="segments"; a minute more
    python benchmarks/host_time.py --growth         host time a node, from 12 to 1,200 blocks; some minutes
    python benchmarks/host_time.py --compile 8192   seconds to compile a plan for one of 8,192 ranks

A step is forward, backward and clearing the gradients. Times are processor time of the calling thread, so waiting for a
collective does not count: what an accelerator's host would spend. The tensors are small, so that Python is most of
it. By hand: functions of torch on the weights, on several ranks column_linear and row_linear of ascend_parallel.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measuring import gain, in_turn, milliseconds, on_ranks, options_of, run, table
from torch import nn
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.sharding import ProcessMesh, ShardedModule, ShardingPlan, parallelize, propagate, trace
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.rank_plan import plan_for_rank

DROPOUT = 0.1


class Block(nn.Module):
    """``x + dropout(down(gelu(up(x))))``."""

    def __init__(self, width: int, dropout: float) -> None:
        """Make the layers."""
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, link=False, rounds=60)
    parser.add_argument("--ranks", type=int, default=1, help="default: 1")
    parser.add_argument("--blocks", type=int, default=12, help="default: 12")
    parser.add_argument("--width", type=int, default=64, help="features of a block (default: 64)")
    parser.add_argument("--rows", type=int, default=32, help="rows of the input (default: 32)")
    parser.add_argument("--segments", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--compile", type=int, metavar="RANKS", help="a multiple of 8")
    options = parser.parse_args()
    if options.compile:
        print(compile_for(options.compile, options.blocks))
        return
    sizes = {"width": options.width, "rows": options.rows, "rounds": options.rounds}
    if options.growth:
        print(growth(sizes))
        return
    rows = []
    for dropout in (0.0, DROPOUT):
        arguments = {**sizes, "blocks": options.blocks, "dropout": dropout, "segments": options.segments}
        found = on_ranks("host_time:rank", options.ranks, **arguments)
        first = found[next(iter(found))]
        rows += [
            [name, f"{dropout:g}", milliseconds(times, 2), f"{gain(times, first):.2f}"] for name, times in found.items()
        ]
    print(table(["step", "dropout", "host ms", f"/ {next(iter(found))}"], rows))


def rank(
    group: dist.ProcessGroup, blocks: int, width: int, rows: int, rounds: int, dropout: float, segments: bool
) -> dict[str, list[float]]:
    """Time every case on this rank."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(width, dropout) for _ in range(blocks))), torch.randn(rows, width)
    plan = plan_of(model, x, ProcessMesh(list(range(group.size())), ["mp"]))
    options = {"settings": Settings(num_chunks=1)}
    forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    if group.size() == 1:
        forwards["plain torch"] = copy.deepcopy(model)
    forwards["by hand"] = ByHand(model, group, dropout)
    forwards["planned"] = ShardedModule(copy.deepcopy(model), plan, **options)
    if segments:
        forwards["planned, segments compiled"] = ShardedModule(
            copy.deepcopy(model), plan, compile="segments", **options
        )
    forwards["planned, run eagerly"] = parallelize(copy.deepcopy(model), plan)
    steps = {name: lambda forward=forward: step(forward, x) for name, forward in forwards.items()}
    return in_turn(steps, rounds, warm_up=4, clock=time.thread_time)


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Run forward and backward, and clear the gradients."""
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


class ByHand(nn.Module):
    """The blocks as a loop over weights, tensor parallel as Megatron-LM's MLP."""

    def __init__(self, model: nn.Sequential, group: dist.ProcessGroup, dropout: float) -> None:
        """Keep this rank's parts of the weights."""
        super().__init__()
        self.group, self.dropout = group, dropout
        self.settings = Settings(num_chunks=1)

        def part(parameter: torch.Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(parameter.detach().chunk(group.size(), dim)[group.rank()].clone())

        whole = [(block.up.weight, block.up.bias, block.down.weight, block.down.bias) for block in model]
        parts = [
            (part(up, 0), part(b, 0), part(down, 1), nn.Parameter(bias.detach().clone())) for up, b, down, bias in whole
        ]
        self.weights = nn.ParameterList(weight for of_block in parts for weight in of_block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        weights = list(self.weights)
        parallel = {"group": self.group, "settings": self.settings}
        for index in range(0, len(weights), 4):
            up, up_bias, down, down_bias = weights[index : index + 4]
            if self.group.size() == 1:
                y = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
            else:
                hidden = F.gelu(column_linear(x, up, up_bias, **parallel))
                y = row_linear(hidden, down, **parallel) + down_bias
            x = x + (F.dropout(y, self.dropout) if self.dropout else y)
        return x


def plan_of(model: nn.Module, x: torch.Tensor, mesh: ProcessMesh, batch: str = "") -> ShardingPlan:
    """Return the plan of column- and row-parallel layers; `batch` names the mesh dimension that shards the rows."""
    split = {} if mesh.size("mp") == 1 else {"*.up": ([(batch or 1, 1), ("mp", 1), None], None)}
    return propagate(trace(model, (x,)), mesh, split, objective="redistribution")


def growth(sizes: dict[str, int]) -> str:
    """Return a table of the host time of a node, for more and more blocks."""
    rows = []
    for blocks in (12, 120, 1200):
        arguments = {**sizes, "blocks": blocks, "dropout": 0.0, "rounds": max(3, sizes["rounds"] * 12 // blocks)}
        found = on_ranks("host_time:rank", 1, limit=1800, title=f"{blocks} blocks:", segments=False, **arguments)
        nodes = 4 * blocks
        rows += [[blocks, name, f"{1e6 * sorted(its)[len(its) // 2] / nodes:.1f}"] for name, its in found.items()]
    return table(["blocks", "step", "host microseconds an operator"], rows)


def compile_for(ranks: int, blocks: int) -> str:
    """Return the seconds to compile a plan of a mesh of this many ranks for its last rank, without processes."""
    if ranks % 8:
        raise ValueError(f"--compile {ranks}: give a multiple of 8")
    mesh = ProcessMesh(torch.arange(ranks).view(-1, 8).tolist(), ["dp", "mp"])
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(4096, 0.0) for _ in range(blocks))), torch.zeros(16 * ranks, 4096)
    plan = plan_of(model, x, mesh, "dp")
    start = time.perf_counter()
    rank_plan = plan_for_rank(plan, (mesh.shape[0] - 1, mesh.shape[1] - 1), Settings(num_chunks=4))
    program = compile_plan(rank_plan, plan.graph, gradients=True)
    seconds = time.perf_counter() - start
    return f"{ranks} ranks, {blocks} blocks: {len(program.instructions)} instructions of a rank in {seconds:.2f} s"


if __name__ == "__main__":
    run(main)
