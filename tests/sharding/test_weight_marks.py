"""Marks on weights alone: operators compute where the weights lie, unless gathering them costs less, which is said."""

import pytest
import torch
from marks import promise
from pool import on_ranks
from sharded_models import compare, made, mesh_of
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.planner.operator_strategy import StrategyError
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.explain import explain

COLUMN, ROW = (None, [("mp", 1)]), (None, [(1, "mp")])
MARKS = {"weights:blocks.*.up.weight": COLUMN, "weights:blocks.*.down.weight": ROW}


class Blocks(nn.Module):
    """Residual blocks of two linear layers; written: with weights that are transposed by hand."""

    def __init__(self, width, wide, written=False):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, wide), "down": nn.Linear(wide, width, bias=False)}) for _ in range(3)
        )
        self.written = written

    def forward(self, x):
        for block in self.blocks:
            if self.written:
                x = x + F.gelu(x @ block["up"].weight.t() + block["up"].bias) @ block["down"].weight.t()
            else:
                x = x + block["down"](F.gelu(block["up"](x)))
        return x


def planned(model, shape, count, **options):
    graph = trace(model, (torch.zeros(shape, dtype=torch.float64, requires_grad=True),))
    options = {"objective": "redistribution", **options}
    return propagate(graph, mesh_of((count,)), MARKS, hardware="cpu-gloo", **options)


def gathered_weights(plan):
    kinds = {one.value.node: {step.kind for step in one.ahead.steps} for one in plan.conversions}
    return [name for name, steps in kinds.items() if name.endswith("weight") and "all_gather" in steps]


@pytest.mark.parametrize("objective", ["redistribution", "time"])
@pytest.mark.parametrize("written", [False, True])
def test_operators_compute_where_their_weights_lie(objective, written):
    """Before, the objective "redistribution" gathered half of the weights: repeated computing had no price."""
    plan = planned(made(Blocks, 512, 2048, written), (8, 128, 512), 4, objective=objective)
    assert gathered_weights(plan) == []
    assert "repeats" not in explain(plan) and "is marked, and gathered" not in explain(plan)
    whole = 12 * 512 * 2048 * 8  # bytes of all weights
    assert plan.memory().parameters < whole / 4 * 1.1


def test_where_gathering_costs_less_it_is_said():
    """Of small weights and many rows, the sums of the rows cost more than the weights and the repeated work."""
    few = planned(made(Blocks, 16, 32), (4096, 16), 2, objective="redistribution")
    said = [line for line in explain(few).splitlines() if "is marked, and gathered" in line]
    assert len(said) == len(gathered_weights(few)) > 0
    assert "blocks.0.up.weight is marked, and gathered: blocks.0.up linear is computed without its slices" in said[0]


class Tied(nn.Module):
    """An embedding, and a head that shares its weight."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.emb(tokens)))


@promise("tied-weights")
def test_a_tied_weight_has_each_of_its_names():
    graph, plans = trace(made(Tied), (torch.zeros(8, dtype=torch.long),)), []
    for name in ("emb", "head"):
        plans.append(propagate(graph, mesh_of((2,)), {f"weights:{name}.weight": ROW}))
        assert set(plans[-1].configured.values()) == {f"weights:{name}.weight"}
    assert plans[0].layouts == plans[1].layouts
    with pytest.raises(
        StrategyError, match=r"there are head\.weight = emb\.weight|there are emb\.weight = head\.weight"
    ):
        propagate(graph, mesh_of((2,)), {"weights:lm_head.weight": ROW})


@pytest.mark.sample("4-True", "2-False")
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@on_ranks()
def test_marked_models_match_one_card(group, written):
    model, x = made(Blocks, 256, 1024, written), torch.randn(4, 96, 256, dtype=torch.float64)
    torch.distributed.broadcast(x, 0)
    plan = planned(model, x.shape, group.size())
    compare(model, ShardedModule(model, plan), x)
    assert gathered_weights(plan) == []
