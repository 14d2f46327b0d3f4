"""Time the plan that the planner chooses and its rivals: how often is the choice the fastest?

    python benchmarks/plans.py --link 1gbit --ranks 2        a row for each model
    python benchmarks/plans.py                               over the loopback, priced as 10 Gbit/s

For small models every combination of layouts of their weights and their residual stream is propagated. The distinct
plans of least predicted time, by either price, run interleaved, forward and backward, with overlapped operators in
--chunks chunks. "in full" prices every collective with its full time; "exposed" prices those next to a matmul with what
the matmul leaves, and sums of gradients with what the backward leaves. The costs are those of cpu-gloo, with a matmul,
elementwise operators, collectives of two sizes, launches, and all-reduces beside matmuls measured here, and the link's
rate as given (docs/predict.md): no time of a plan or of an overlapped operator is in them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import in_turn, on_ranks, options_of, run, table
from torch import nn
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.ops.collectives import all_gather_single, reduce_scatter_single
from ascend_parallel.sharding import ProcessMesh, ShardedModule, propagate, trace
from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.tuning.cost_model.cost import ELEMENTWISE_BACKWARD, MOST_PROCESSOR
from ascend_parallel.tuning.cost_model.hardware import Contention, Hardware, find_hardware

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sharding"))
from small_models import GPT, GPTLayer

CLOSE = 1.03
# Read and written, as the prices count, by the forward of an addition, a norm and a GELU of [1024, 1024] in fp32.
ELEMENTWISE_BYTES = (3 + 2 + 2) * 4 * 1024**2
# All-reduces of 1 KiB: the host's time of a launch is the difference.
ISSUED = (1, 9)
# What is measured of the hardware.
MEASURED = ("matmul", "memory", "collectives", "contention", "host")
# Bytes of a piece of an all-reduce beside matmuls.
PIECE = 1 << 20
# Rows of 256 fp32 numbers of a rank, in the collectives that are measured.
SIZES = {"small": 1, "large": 2048}
PRICES = {"in full": False, "exposed": True}
COLUMN, ROW = ([None, ("mp", 1)], None), ([None, (1, "mp")], None)
WEIGHTS = {"column": COLUMN, "row": ROW, "whole": ([None, (1, 1)], None)}
STREAM = {"whole": (None, [(1, 1, 1)]), "rows": (None, [("mp", 1, 1)]), "sequence": (None, [(1, "mp", 1)])}
Strategies = dict[str, Any]


class Mlp(nn.Module):
    """Blocks x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, wide: int, blocks: int = 2) -> None:
        """Make the layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(width, wide, bias=False) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(wide, width, bias=False) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x.square().mean()


class Attention(nn.Module):
    """A layer of attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = GPTLayer(width, heads, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        return self.layer(x).square().mean()


@dataclass(frozen=True)
class Case:
    """A model with its inputs, and the patterns of its weights, and of the sums that make its residual stream."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    weights: tuple[str, ...]
    stream: str


def tokens(vocabulary: int, *shape: int) -> tuple[torch.Tensor, ...]:
    """Return tokens and targets."""
    return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)


CASES = {
    "MLP, 2048 rows": Case(lambda: Mlp(512, 1024), lambda: (torch.randn(8, 256, 512),), ("up.*", "down.*"), ":add"),
    "MLP, 512 rows": Case(lambda: Mlp(512, 2048), lambda: (torch.randn(4, 128, 512),), ("up.*", "down.*"), ":add"),
    "attention": Case(
        lambda: Attention(512, 8),
        lambda: (torch.randn(4, 256, 512),),
        ("layer.qkv", "layer.o", "layer.up", "layer.down"),
        "layer:add",
    ),
    "GPT": Case(
        lambda: GPT(2, 256, 8, 1024, 256),
        lambda: tokens(1024, 4, 256),
        ("layers.*.qkv", "layers.*.o", "layers.*.up", "layers.*.down"),
        "layers.*:add",
    ),
}


def main() -> None:
    """Read the command line, measure, print a row for each model, and the sums."""
    parser = options_of(__doc__, rounds=9, json=True)
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--chunks", type=int, default=4, help="default: 4")
    parser.add_argument("--rivals", type=int, default=4, help="plans of least time by each price; default: 4")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    found = on_ranks(
        "plans:rank",
        options.ranks,
        link=options.link,
        rounds=options.rounds,
        chunks=options.chunks,
        rivals=options.rivals,
        cases=options.cases,
        rate=options.link,
    )
    if options.json:
        options.json.write_text(json.dumps(found))
    heads = ["model", "ranks", "link", "plans run", "fastest ms"]
    heads += [f"chosen {price}: predicted, measured ms, of the fastest" for price in PRICES]
    rows = [row(name, options.ranks, options.link or "loopback", result) for name, result in found.items()]
    print(table(heads, rows))
    for name, result in found.items():
        print(f"{name}: " + "; ".join(f"{price}: {kinds}" for price, kinds in result["collectives"].items()))
    for price in PRICES:
        shares = [shares_of(result)[price] for result in found.values()]
        print(f"{price}: {sum(share <= CLOSE for share in shares)} of {len(shares)} within 3 % of the fastest")


def shares_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return, by price, the median over rounds of the choice's time against that of the fastest plan."""
    times = result["times"]
    fastest = min(times, key=lambda name: median(times[name]))
    return {
        price: median(mine / least for mine, least in zip(times[chosen], times[fastest], strict=True))
        for price, chosen in result["chosen"].items()
    }


def row(name: str, ranks: int, link: str, result: Mapping[str, Any]) -> list[object]:
    """Return the cells of a model."""
    times, shares = result["times"], shares_of(result)
    chosen = [
        f"{1e3 * result['predicted'][price]:.1f}, {1e3 * median(times[plan]):.1f}, {shares[price]:.3f}"
        for price, plan in result["chosen"].items()
    ]
    return [name, ranks, link, len(times), f"{1e3 * min(map(median, times.values())):.1f}", *chosen]


def rank(
    group: dist.ProcessGroup, rounds: int, chunks: int, rivals: int, cases: Iterable[str], rate: str | None
) -> dict[str, Any]:
    """Choose, find rivals, and time all of them on this rank."""
    hardware, settings = measured_hardware(group, rate), Settings(num_chunks=chunks)
    mesh, results = ProcessMesh(list(range(group.size())), ["mp"]), {}
    for name in cases:
        case = CASES[name]
        torch.manual_seed(1)
        model, inputs = case.make(), case.inputs()
        plans, chosen = candidates(case, trace(model, inputs), mesh, hardware, settings, rivals)
        steps = {
            digest: step_of(ShardedModule(model, plan, settings=settings), inputs) for digest, plan in plans.items()
        }
        results[name] = {
            "times": in_turn(steps, rounds),
            "chosen": {price: each.digest for price, each in chosen.items()},
            "predicted": {price: each.cost for price, each in chosen.items()},
            "collectives": {price: each.collectives() for price, each in chosen.items()},
            "plans": {digest: described(plan) for digest, plan in plans.items()},
            "measured": {part: str(getattr(hardware, part)) for part in MEASURED},
        }
    return results


def described(plan: ShardingPlan) -> dict[str, Any]:
    """Return what a plan was predicted to take by its own price, and its collectives."""
    priced = next(name for name, overlap in PRICES.items() if overlap == (plan.overlap is not None))
    return {"price": priced, "predicted": plan.cost, "hidden sums": plan.hidden_sums, "collectives": plan.collectives()}


def step_of(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Return a function that runs forward and backward."""

    def step() -> None:
        module.zero_grad()
        module(*inputs).backward()

    return step


def candidates(
    case: Case, graph: Graph, mesh: ProcessMesh, hardware: Hardware, settings: Settings, rivals: int
) -> tuple[dict[str, ShardingPlan], dict[str, ShardingPlan]]:
    """Return by digest the plans of least time by each price, and each price's choice."""

    def plan(strategies: Strategies, overlap: bool) -> ShardingPlan:
        return propagate(graph, mesh, strategies, hardware=hardware, overlap=overlap, settings=settings)  # type: ignore[arg-type]

    chosen = {price: plan({}, overlap) for price, overlap in PRICES.items()}
    found = {each.digest: each for each in chosen.values()}
    given = list(combinations(case))
    for overlap in PRICES.values():
        costs: list[tuple[float, str, int]] = []  # of this rank's share of the combinations
        for index in range(dist.get_rank(), len(given), dist.get_world_size()):
            try:
                each = plan(given[index], overlap)
            except ValueError:  # a slice that is not even
                continue
            costs.append((each.cost, each.digest, index))
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, costs)
        best = dict[str, int]()
        for _, digest, index in sorted(chain.from_iterable(of_ranks)):
            best.setdefault(digest, index)
        found |= {digest: plan(given[index], overlap) for digest, index in islice(best.items(), rivals + 1)}
    return found, chosen


def combinations(case: Case) -> Iterable[Strategies]:
    """Yield a strategy for every weight and for the stream, or none for the stream."""
    for kinds in product(WEIGHTS.values(), repeat=len(case.weights)):
        of_weights = dict(zip(case.weights, kinds, strict=True))
        yield of_weights
        for stream in STREAM.values():
            yield {**of_weights, case.stream: stream}


def measured_hardware(group: dist.ProcessGroup, rate: str | None) -> Hardware:
    """Return cpu-gloo with what this machine takes for a matmul, elementwise operators, and collectives.

    A collective's time is linear: from the smallest one, and one of 4 MiB less its time on the wire. Elementwise
    operators, forward and backward, give the memory's bandwidth that the prices count with. All are measured alone.
    Four all-reduces beside matmuls give the slowdown of either; the thread's time of issuing all-reduces, the host's
    time of a launch.
    """
    known, ranks = find_hardware("cpu-gloo").with_link(rate or "10gbit"), group.size()
    x = torch.randn(1024, 1024)
    runs: dict[str, Callable[[], object]] = {"matmul": lambda: x @ x, "elementwise": elementwise}
    for size, rows in SIZES.items():
        whole, part = torch.zeros(rows * ranks, 256), torch.zeros(rows, 256)
        runs |= {
            f"all_reduce {size}": lambda whole=whole: dist.all_reduce(whole, group=group),
            f"all_gather {size}": lambda whole=whole, part=part: all_gather_single(whole, part, group).wait(),
            f"reduce_scatter {size}": lambda whole=whole, part=part: reduce_scatter_single(part, group, whole).wait(),
        }
    took = {name: median(times) for name, times in in_turn(runs, 11).items()}
    assert known.link is not None
    fitted = {}
    for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        small, large = (took[f"{kind} {size}"] for size in SIZES)
        nbytes = 4 * 256 * ranks * SIZES["large"]
        wire = rounds * nbytes * (ranks - 1) / ranks * known.link.seconds_per_byte
        fitted[kind] = ((float("inf"), small, max(0.0, large - small - wire) / nbytes, 0.0),)
    computing, communicating = slowdowns(group)
    issuing = in_turn({count: lambda count=count: issue(group, count) for count in ISSUED}, 11, clock=time.thread_time)
    few, many = (median(issuing[count]) for count in ISSUED)
    moving = min(MOST_PROCESSOR, known.link.processor / known.link.seconds_per_byte)  # which the model counts itself
    return replace(
        known,
        matmul=replace(known.matmul, frequency=1024**3 / took["matmul"]),
        memory=replace(
            known.memory,
            bandwidth=(1 + ELEMENTWISE_BACKWARD) * ELEMENTWISE_BYTES / took["elementwise"],
            efficiency=1.0,
        ),
        collectives=replace(known.collectives, whole_gather=1.0, **fitted),  # type: ignore[arg-type]
        contention=Contention(collective=communicating, compute=computing * (1 - moving)),
        host=replace(known.host, launch=max(0.0, many - few) / (ISSUED[1] - ISSUED[0])),
    )


def elementwise() -> None:
    """Run an addition, a norm and a GELU of [1024, 1024] forward and backward."""
    x = torch.ones(1024, 1024, requires_grad=True)
    F.gelu(F.layer_norm(x + x.detach(), (1024,))).sum().backward()


def issue(group: dist.ProcessGroup, count: int) -> None:
    """Issue so many all-reduces, and wait for them."""
    for work in [dist.all_reduce(torch.zeros(256), group=group, async_op=True) for _ in range(count)]:
        work.wait()


def slowdowns(group: dist.ProcessGroup, rounds: int = 9) -> tuple[float, float]:
    """Return the slowdown of small matmuls beside four all-reduces in flight, and that of these beside matmuls."""
    x, w, pieces = torch.randn(128, 512), torch.randn(512, 512), torch.zeros(4, PIECE // 4)

    def start() -> list[dist.Work]:
        return [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]

    def alone() -> None:
        for work in start():
            work.wait()

    times = {name: median(each) for name, each in in_turn({"matmul": lambda: x @ w, "sums": alone}, rounds).items()}
    found = []
    for _ in range(rounds):
        dist.barrier()
        works, count, begun = start(), 0, time.perf_counter()
        while not all(work.is_completed() for work in works):
            x @ w
            count += 1
        took = time.perf_counter() - begun
        found.append((took / max(1, count) / times["matmul"], took / times["sums"]))
    slowest = torch.tensor([median(each) for each in zip(*found, strict=True)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    computing, communicating = slowest.clamp(min=1.0).tolist()
    return computing, communicating


if __name__ == "__main__":
    run(main)
