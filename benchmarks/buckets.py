"""Time data-parallel and gathered linear layers: collectives in place, in buckets, prefetched, and DDP's.

    python benchmarks/buckets.py --link 1gbit       about a minute
    python benchmarks/buckets.py                    over the loopback

Forward and backward of tanh(linear(x)), fp32, on 2 ranks. "data parallel": weights are replicated and
gradients summed. "gathered": weights are sharded as in ZeRO-3, gathered where they are read, and gradients
reduce-scattered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from measuring import gain, in_turn, milliseconds, on_ranks, options_of, run, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ascend_parallel.sharding import ProcessMesh, ShardedModule, propagate, trace

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


def main() -> None:
    """Read the command line, measure, print."""
    options = options_of(__doc__, rounds=15).parse_args()
    found = on_ranks("buckets:rank", RANKS, link=options.link, rounds=options.rounds)
    rows = []
    for name, times in found.items():
        first = next(theirs for other, theirs in found.items() if other.partition(",")[0] == name.partition(",")[0])
        rows.append([name, milliseconds(times), f"{gain(first, times):.2f}"])
    print(table(["", "ms", "the first of its kind / it"], rows))


def rank(group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Time every variant on this rank."""
    x = torch.randn(ROWS // RANKS, WIDTH)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).backward()

    return in_turn({name: lambda model=model: step(model) for name, model in variants().items()}, rounds)


def variants() -> dict[str, nn.Module]:
    """Return all variants of the layers."""
    torch.manual_seed(1)
    whole, mesh = Stack(), ProcessMesh(list(range(RANKS)), ["dp"])
    graph = trace(whole, (torch.zeros(ROWS, WIDTH),))
    rows = dict.fromkeys(("inputs:*", "*:linear", "*:tanh"), (None, [("dp", 1)]))
    plans = {
        kind: propagate(graph, mesh, rows | {"weights:*.weight": (None, [cut])}, objective="redistribution")
        for kind, cut in {"data parallel": (1, 1), "gathered": ("dp", 1)}.items()
    }
    sizes = {"each where it stands": 0, "1 MB": WEIGHT, "2 MB": 2 * WEIGHT, "25 MB": 25 << 20}
    return {
        f"{kind}, {name}": ShardedModule(whole, plan, bucket_bytes=size, local_inputs=True)
        for kind, plan in plans.items()
        for name, size in sizes.items()
    } | {"data parallel, torch's DDP": DistributedDataParallel(Stack(), bucket_cap_mb=2)}


if __name__ == "__main__":
    run(main)
