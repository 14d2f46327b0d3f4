"""What autograd keeps beside parameters that are gathered again in backward."""

import gc

import pytest
import torch
import torch.distributed as dist
from sharded import made, mesh_of
from torch import nn

from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.running.execute import ShardedModule
from ascend_parallel.sharding.trace import trace
from ascend_parallel.strategy.optimizer import sharded_parameters


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8, bias=False), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (torch.tanh(self.inner(x)) * self.scale).square().mean()


def built():
    whole, x = made(Scaled), torch.arange(32, dtype=torch.float64).reshape(4, 8) / 32
    plan = propagate(trace(whole, (x,)), mesh_of((2,)), {}, semi_auto="mp")
    sharded = ShardedModule(whole, sharded_parameters(plan, "mp"), local_inputs=True)
    rank = dist.get_rank()
    return sharded, x[2 * rank : 2 * rank + 2].clone()


def discarded(group):
    sharded, x = built()

    def tensors():
        gc.collect()
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    sharded(x)
    before = tensors()
    for _ in range(3):
        sharded(x)
    assert tensors() == before


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_forward_without_backward_keeps_nothing(ranks):
    ranks(2).run(discarded)


def changed(group, what):
    sharded, x = built()
    loss = sharded(x)
    with torch.no_grad():
        {"input": x, "scale": sharded.scale}[what].mul_(3)
    with pytest.raises(RuntimeError, match="was changed in place after forward"):
        loss.backward()


@pytest.mark.parametrize("what", ["input", "scale"])
def test_what_backward_needs_must_not_change(ranks, what):
    ranks(2).run(changed, what)
