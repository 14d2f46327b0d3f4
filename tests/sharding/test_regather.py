"""Tensors that autograd keeps if backward gathers parameters a second time."""

import gc

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from sharded_models import made, mesh_of
from torch import nn

from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.optimizer import sharded_parameters


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (torch.tanh(self.inner(x)) * self.scale).square().mean()


def built():
    whole, x = made(Scaled), torch.arange(32, dtype=torch.float64).reshape(4, 8) / 32
    plan = propagate(trace(whole, (x,)), mesh_of((2,)), {}, semi_auto="mp", objective="redistribution")
    sharded = ShardedModule(whole, sharded_parameters(plan, "mp"), local_inputs=True)
    rank = dist.get_rank()
    return sharded, x[2 * rank : 2 * rank + 2].clone()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks(2)
def test_a_forward_without_backward_keeps_nothing(group):
    sharded, x = built()

    def tensors():
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    sharded(x)
    before = tensors()
    for _ in range(3):
        sharded(x)
    assert tensors() == before


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def recomputed(group, collectives):
    """Return the number of gathered weights alive after forward, and the number of gathers. Checks the gradients."""
    whole, x = made(Deep), torch.arange(32, dtype=torch.float64).reshape(4, 8) / 32
    plan = sharded_parameters(
        propagate(trace(whole, (x,)), mesh_of((2,)), {}, semi_auto="mp", objective="redistribution"), "mp"
    )
    recompute = Recompute(modules=["layers.*"], collectives=collectives)
    sharded = ShardedModule(whole, plan, recompute=recompute)
    loss = sharded(x)
    gc.collect()
    shapes = [tuple(thing.shape) for thing in gc.get_objects() if type(thing) is torch.Tensor]
    loss.backward()
    gathers = sum(
        count
        for event, count in sharded.collective_counts.items()
        if event.kind == "all_gather" and "weight" in event.value.node
    )
    whole(x).backward()
    found, expected = sharded.full_gradients(), {name: param.grad for name, param in whole.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)
    return shapes.count((12, 8)) + shapes.count((8, 12)), gathers


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("collectives", ["keep", "recompute"])
def test_recompute_gathers_weights_a_second_time(ranks, collectives):
    assert ranks(2).run(recomputed, collectives) == [(0, 12), (0, 12)]


@pytest.mark.parametrize("what", ["input", "scale"])
@on_ranks(2)
def test_a_change_of_a_saved_tensor_is_refused(group, what):
    sharded, x = built()
    loss = sharded(x)
    with torch.no_grad():
        {"input": x, "scale": sharded.scale}[what].mul_(3)
    with pytest.raises(RuntimeError, match=r"was changed in place after forward|has been modified inplace"):
        loss.backward()
