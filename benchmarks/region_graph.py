"""Make the steps of ``benchmarks/region.py --graph``: a planned GPT, serial, layer by layer and with regions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import in_turn
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sharding"))

from small_models import GPT

BATCH, VOCABULARY, HEAD = 4, 512, 64
FORMS = ("all-reduce", "reduce-scatter")


def check_shape(rows: int, hidden: int, ranks: int) -> None:
    """Raise a `ValueError` if a model of this shape cannot be planned on this number of ranks."""
    for name, size, multiple in (("M", rows, BATCH * ranks), ("H", hidden, HEAD * ranks)):
        if size % multiple:
            raise ValueError(f"--shapes {rows},{hidden}: with --graph, give a multiple of {multiple} as {name}")


def rank(group: dist.ProcessGroup, options: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Time every shape in both forms on this rank; return the seconds by variant of each."""
    return [_times(group, *shape, form, options) for shape in options["shapes"] for form in FORMS]


def _times(
    group: dist.ProcessGroup, rows: int, hidden: int, form: str, options: dict[str, Any]
) -> dict[str, list[float]]:
    torch.manual_seed(0)
    length = rows // BATCH
    model = GPT(width=hidden, heads=hidden // HEAD, vocabulary=VOCABULARY, length=length).eval()
    drawn = torch.randint(VOCABULARY, (BATCH, length + 1))
    batch = drawn[:, :-1], drawn[:, 1:]
    plan = planned(trace(model, batch), ProcessMesh(list(range(group.size())), ["mp"]), form)
    chunked = {"num_chunks": options["chunks"]}
    settings = {"serial": Settings(mode=1), "layers": Settings(**chunked), "region": Settings(**chunked, region=True)}
    runs: dict[str, Callable[[], object]] = {}
    for name, of_variant in settings.items():
        sharded = ShardedModule(model, plan, settings=of_variant)
        runs[name] = _step(sharded, batch, options["backward"])
    return in_turn(runs, options["rounds"])


def planned(graph: Graph, mesh: ProcessMesh, form: str) -> ShardingPlan:
    """Return a plan with Megatron-core's layouts; with "reduce-scatter" the rows of the stream are sharded."""
    chosen: dict[str, object] = {}
    chosen |= dict.fromkeys(["layers.*.qkv", "layers.*.up"], (((None, None, None), ("mp", None)), None))
    chosen |= dict.fromkeys(["layers.*.o", "layers.*.down"], (((None, None, "mp"), (None, "mp")), None))
    rows = (None, "mp" if form == "reduce-scatter" else None, None)
    chosen |= dict.fromkeys(["layers.*:add", "layers.*.norm?"], (None, (rows,)))
    return propagate(graph, mesh, chosen, objective="redistribution")


def _step(sharded: nn.Module, batch: tuple[torch.Tensor, ...], backward: bool) -> Callable[[], object]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = sharded(*batch)
        return loss

    def step() -> None:
        sharded.zero_grad()
        sharded(*batch).backward()

    return step if backward else forward
