"""recompute() on plain modules and functions, and the effect of its marks in a planned model."""

import copy
from collections import Counter

import pytest
import small_models
import torch
from allocations import alive_bytes
from dispatched import Dispatched
from pool import on_ranks
from sharded_models import BATCHES, made, mesh_of, planned
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.planner.operator_strategy import StrategyError
from ascend_parallel.sharding.runtime.randomness import manual_seed
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.recompute import Recomputable, recompute


class Block(Recomputable):
    """A model of nested modules, dropout, attention, and a custom activation."""

    def __init__(self, activation=F.gelu):
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(16), nn.Linear(16, 48), nn.Dropout(0.3)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Dropout(0.2), nn.Linear(64, 16))
        self.activation = activation

    def forward(self, x, scale=1.0):
        q, k, v = self.mix(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)  # one head
        x = x + self.drop(F.scaled_dot_product_attention(q, k, v).squeeze(1)) * scale
        return x + self.mlp(self.activation(x))


class Stack(nn.Module):
    def __init__(self, activation=F.gelu):
        super().__init__()
        self.blocks = nn.ModuleList(Block(activation) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().sum()


def step(model, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return loss.detach(), x.grad, gradients, torch.rand(1)


@pytest.fixture
def stack():
    return made(Stack), torch.randn(4, 32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def bytes_between(model, x):
    return alive_bytes(lambda: model(x))


KEEPS = [(), ("mlp.3",), ("mlp.*",), (":*scaled_dot_product*", "mix"), ("mlp.0:addmm",)]


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_a_module(stack, keep):
    model, x = stack
    if "mlp.*" in keep:
        model.blocks.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else None)
    expected, plain = step(model, x), bytes_between(model, x)
    for block in model.blocks:
        assert recompute(block, keep=keep) is block
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
    torch.testing.assert_close(step(copy.deepcopy(model), x), expected, rtol=0, atol=0)
    less = bytes_between(model, x)
    assert less < plain / (8 if not keep else 1.5)
    for block in model.blocks:
        recompute(block, False)
    assert bytes_between(model, x) == plain
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)


def test_what_is_kept_is_not_computed_twice(stack):
    model, x = stack
    plain, again = Counter(), Counter()
    with Dispatched(lambda operator, _: plain.update([operator._opname])):
        step(model, x)
    for block in model.blocks:
        block.recompute(keep=("mlp.3", ":*scaled_dot_product*"))
    with Dispatched(lambda operator, _: again.update([operator._opname])):
        step(model, x)
    assert again["_scaled_dot_product_flash_attention_for_cpu"] == 3
    assert again["silu"] == 2 * plain["silu"] == 6
    # of the three linear layers of each block the last layer's product is not computed again
    assert again["addmm"] - plain["addmm"] == 2 * 3


def test_nested_marks(stack):
    model, x = stack
    expected = step(model, x)
    recompute(model)
    for block in model.blocks:
        recompute(recompute(block).mlp, keep=("3",))
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(model(x), expected[0], rtol=0, atol=0)


def test_a_function():
    def gated(x):
        return F.silu(x) * x.sigmoid().tanh()

    plain, again = (made(Stack, activation) for activation in (gated, recompute(gated)))
    x = torch.randn(4, 32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(step(again, x), step(plain, x), rtol=0, atol=0)
    # sigmoid's, tanh's and silu's results; what is read is kept anyway
    assert bytes_between(plain, x) - bytes_between(again, x) == pytest.approx(3 * 3 * x.nbytes, rel=0.1)
    with pytest.raises(ValueError, match="are for modules"):
        recompute(gated, keep=("x",))


def test_refusals(stack):
    model, x = stack
    block = model.blocks[0]
    with pytest.raises(StrategyError, match=r"'mlp\.7' names no module of Block; there are"):
        recompute(block, keep=("mlp.7",))
    with pytest.raises(StrategyError, match="'mlp' has modules of its own"):
        recompute(block, keep=("mlp",))
    with pytest.raises(ValueError, match="give one of keep, recompute"):
        recompute(block, collectives="never")
    recompute(block, keep=(":conv2d",))
    with pytest.raises(StrategyError, match=":conv2d names no operator that Block runs"):
        model(x)
    recompute(block, keep=("drop",))
    with pytest.raises(StrategyError, match="'drop' runs bernoulli_, which draws random numbers"):
        model(x)
    recompute(block, False)
    block.forward = lambda x, scale: x
    with pytest.raises(ValueError, match="was replaced on the instance"):
        recompute(block)


@pytest.mark.slow
@on_ranks(2)
def test_marks_on_a_planned_model(group):
    """The marks on a traced model's modules determine the recomputed regions of its plan."""
    model = made(small_models.GPT, dropout=0.3)
    batch = BATCHES["GPT"](torch.Generator().manual_seed(7))
    names = list(trace(model, batch).nodes)
    for layer in model.layers:
        recompute(layer, keep=("down", ":gelu"), collectives="recompute")
    graph = trace(model, batch)
    assert list(graph.nodes) == names
    assert Recompute.of(model) == Recompute(
        modules=["layers.0", "layers.1"],
        keep=["layers.0.down", "layers.0:gelu", "layers.1.down", "layers.1:gelu"],
        collectives="recompute",
    )
    plan = planned("GPT", graph, mesh_of((2,)))
    found = []
    for recomputed in (None, Recompute()):
        sharded = ShardedModule(model, plan, recompute=recomputed)
        manual_seed(sharded, 3)
        sharded(*batch).backward()
        blocks = sharded.rank_plan.checkpointed_blocks.values()
        found.append((sharded.full_gradients(), [block.module for block in blocks]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    recompute(model.layers[0])
    with pytest.raises(ValueError, match="give the same option on all modules"):
        Recompute.of(model)
    assert found[0][1] == ["layers.0", "layers.1"]
    assert found[1][1] == []
