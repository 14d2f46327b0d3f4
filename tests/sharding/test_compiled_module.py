"""A sharded module whose plan is compiled once: copies, replaced parts, buffers of buffers, and compiled segments."""

import copy
from collections import Counter

import pytest
import torch
from pool import on_ranks
from sharded_models import MLP, Blocks, made, mesh_of, tensor_parallel
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.sharding import propagate, trace
from ascend_parallel.sharding.runtime.segments import Segment
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule


class History(nn.Module):
    """Keeps the means of the last two outputs; no operator reads `before`."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 4, dtype=torch.float64)
        self.register_buffer("last", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("before", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        y = self.up(x)
        self.before.copy_(self.last)
        self.last.copy_(y.mean(0).detach())
        return y, self.before


def x_of(seed, features=6):
    return torch.randn(8, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@on_ranks(2)
def test_a_buffer_stored_from_another_gets_the_value_from_before(group):
    whole = made(History)
    sharded = ShardedModule(whole, propagate(trace(whole, (x_of(0),)), mesh_of((2,)), objective="redistribution"))
    for seed in range(3):
        expected, found = whole(x_of(seed)), sharded(x_of(seed))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(dict(sharded.named_buffers()), dict(whole.named_buffers()))


def mlp(**options):
    whole = made(MLP)
    x = x_of(1, whole.up.in_features).reshape(2, 4, -1)
    plan = tensor_parallel(trace(whole, (x,)), mesh_of((2,)))
    return whole, ShardedModule(whole, plan, settings=Settings(num_chunks=2), **options), x


def step(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_a_copy_trains_and_counts_for_itself(group, overlap):
    _, sharded, x = mlp(overlap=overlap)
    first = step(sharded, x)
    other = copy.deepcopy(sharded)
    assert other.collective_counts == sharded.collective_counts
    counts = Counter(sharded.collective_counts)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(step(sharded, x), first, rtol=0, atol=0)
    own = Counter(sharded.collective_counts)
    assert not torch.equal(step(other, x)[0], first[0])
    assert sharded.collective_counts == own  # the copy counts for itself
    assert overlap or own != counts
    with pytest.raises(AttributeError):
        sharded.collective_counts = Counter()


@on_ranks(2)
def test_a_replaced_submodule_is_the_one_that_runs(group):
    _, sharded, x = mlp()
    before = sharded(x)
    other = nn.Module()
    for name, parameter in sharded.up.named_parameters():
        other.register_parameter(name, nn.Parameter(parameter.detach() * 3))
    sharded.up = other
    assert not torch.allclose(sharded(x), before)
    step(sharded, x)
    assert all(parameter.grad is not None for parameter in other.parameters())


@on_ranks(2)
def test_another_value_of_compile_is_refused(group):
    with pytest.raises(ValueError, match="compile='all': give 'segments', or None"):
        mlp(compile="all")


def in_segments(group):
    whole = made(Blocks, 2, 8, 32)
    x = x_of(1, 8).reshape(2, 4, 8)
    plan = propagate(trace(whole, (x,)), mesh_of((2,)), objective="redistribution")
    alone, compiled = ShardedModule(whole, plan), ShardedModule(whole, plan, compile="segments")
    segments = [each for each in compiled.instructions(gradients=True).instructions if isinstance(each, Segment)]
    for _ in range(2):
        torch.testing.assert_close(step(compiled, x), step(alone, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), alone(x))
    return sum(len(segment.runs) for segment in segments)


@pytest.mark.slow
def test_compiled_segments_compute_the_same(ranks):
    counts = ranks(2).run(in_segments)
    assert counts[0] == counts[1] > 2
