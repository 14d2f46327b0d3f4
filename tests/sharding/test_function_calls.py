"""Strategies on calls of functions inside a forward: `shard(F.scaled_dot_product_attention, ...)`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from one_card import losses_of
from pool import on_ranks
from torch import nn

from ascend_parallel.sharding import (
    ProcessMesh,
    ShardedModule,
    StrategyError,
    TraceError,
    explain,
    parallelize,
    propagate,
    shard,
    trace,
    unshard,
)

HEADS = [(None, "mp", None, None)] * 3
MESH = ProcessMesh([0, 1], ["mp"])
attention = shard(F.scaled_dot_product_attention, in_strategy=HEADS, out_strategy=[(1, "mp", 1, 1)])
product = shard(torch.matmul, in_strategy=[None, ("mp", None)])
written = shard(torch.relu_, out_strategy=[("mp", 1)])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.w = nn.Linear(16, 48), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 8, 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = attention(q, k, v, is_causal=True)
        return product(y.transpose(1, 2).flatten(2), self.w)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Identity(), function

    def forward(self, x):
        return self.function(self.inner(x) * 1) + 1


def plan_of(model, x, **options):
    return propagate(trace(model, (x,)), MESH, **{"objective": "redistribution", **options})


def test_a_function_computes_what_it_did_and_says_who_configured():
    x = torch.randn(2, 8, 4, 2)
    assert torch.equal(shard(F.gelu, [None])(x), F.gelu(x))
    assert shard(F.gelu, [None]).__name__ == "gelu"
    assert shard(F.gelu, [None]).__wrapped__ is F.gelu
    plan = plan_of(Attention(), torch.zeros(2, 4, 16))
    said = {"scaled_dot_product_attention": "shard(F.scaled_dot_product_attention)", "matmul": "shard(torch.matmul)"}
    assert plan.configured == said
    assert "[configured: shard(F.scaled_dot_product_attention)]" in explain(plan)
    assert [str(one[0]) for one in plan.inputs["scaled_dot_product_attention"]] == ["S(1)"] * 3
    assert str(plan.inputs["matmul"][1][0]) == "S(0)"


def test_a_pattern_goes_before_a_mark():
    pattern = ":scaled_dot_product_attention"
    wanted = {pattern: ([("mp", None, None, None)] * 3, None)}
    plan = plan_of(Attention(), torch.zeros(2, 4, 16), strategies=wanted)
    assert plan.configured["scaled_dot_product_attention"] == pattern
    assert str(plan.inputs["scaled_dot_product_attention"][0][0]) == "S(0)"
    assert plan.configured["matmul"] == "shard(torch.matmul)"


def test_a_mark_stays_on_what_works_in_place():
    plan = plan_of(Calls(written), torch.zeros(4, 4))
    assert list(plan.configured.values()) == ["shard(F.relu_)"]


def test_a_compiler_sees_the_function_alone():
    model, x = Attention(), torch.randn(2, 4, 16)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: F.relu(x) * 2, r"runs 2 operators \(aten.relu.default, aten.mul.Tensor\): give the strategy to a"),
        (lambda x: x, "runs no operator"),
        (lambda x: torch.ops.aten.linear(x, torch.eye(4)), "operators"),
    ],
)
def test_a_function_of_several_operators_or_none_is_refused(function, message):
    with pytest.raises(TraceError, match=message):
        trace(Calls(shard(function, [None])), (torch.zeros(4, 4),))


def test_a_strategy_that_cannot_be_is_refused():
    with pytest.raises(StrategyError, match=r"shard\(torch.relu\) in the model: .* uses mesh dimension mp twice"):
        plan_of(Calls(shard(torch.relu, [("mp", "mp")])), torch.zeros(4, 4))
    with pytest.raises(StrategyError, match=r"aten.relu.default of \[3, 4\] cannot have \(S\(0\)\)"):
        plan_of(Calls(shard(torch.relu, [("mp", 1)])), torch.zeros(3, 4))
    for target in (nn.Linear, 3):
        with pytest.raises(StrategyError, match="shard takes a module or a function"):
            shard(target, [None])


def mean_square(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("count", [2, 4])
@on_ranks()
def test_a_configured_call_trains_like_the_whole_model(group):
    """Run ten steps of the graph, the eager model and the whole model, in float64."""
    torch.manual_seed(0)
    whole = Attention().double()
    eager = copy.deepcopy(whole)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    plan = propagate(trace(whole, (x,)), ProcessMesh(list(range(group.size())), ["mp"]), objective="redistribution")
    sharded = ShardedModule(whole, plan)
    assert sharded.w.shape == (16 // group.size(), 16)
    losses = [
        losses_of(model, torch.optim.SGD(model.parameters(), lr=1e-4), [(x,)] * 10, mean_square)
        for model in (sharded, parallelize(eager, plan), whole)
    ]
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), gradients)
    torch.testing.assert_close({name: unshard(one.grad) for name, one in eager.named_parameters()}, gradients)
    assert losses[-1][-1] < losses[-1][0]
    found, eager, expected = losses
    assert found == pytest.approx(expected, rel=1e-10)
    assert eager == pytest.approx(expected, rel=1e-10)
