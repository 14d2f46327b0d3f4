"""Tests models with side effects in Python: numbers that differ between runs, changed attributes, gradient hooks."""

import random
import threading

import numpy as np
import pytest
import torch
from marks import promise
from pool import on_ranks
from sharded_models import mesh_of
from torch import nn

from ascend_parallel.sharding import ShardedModule, TraceError, parallelize, propagate, trace
from ascend_parallel.training import ShardingOptions, Strategy, train_step

SCALE = [0]


class Layer(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear, self.norm, self.written = nn.Linear(4, 4), nn.BatchNorm1d(4), forward
        self.steps, self.seen, self.rows, self.last = 0, [], None, None

    def forward(self, x):
        return self.written(self, x)


def counting(self, x):
    self.steps += 1
    return self.linear(x)


def remembering(self, x):
    y = self.linear(x)
    self.seen.append(len(self.seen))
    return y


def warming_up(self, x):
    self.steps += 1
    return self.linear(x) * min(self.steps, 100)


def scaled_by_a_global(self, x):
    SCALE[0] += 1
    return self.linear(x) * SCALE[0]


def every_second(self, x):
    self.steps += 1
    if self.steps % 2:
        x = self.norm(x)
    return self.linear(x)


def layer_drop(self, x):
    if random.random() > 0.001:  # takes the same way in nearly every run
        x = self.linear(x)
    return x


def noise_of_numpy(self, x):
    return self.linear(x) * float(np.random.rand())


def hooked_inside(self, x):
    y = self.linear(x)
    y.register_hook(lambda gradient: gradient * 0)
    return y


def harmless(self, x):
    """Has a cache that is filled once, running statistics, and a result kept for inspection."""
    self.rows = x.shape[0]
    self.last = self.norm(self.linear(x))
    return self.last


def line_of(function, below):
    return rf"test_python_state\.py:{function.__code__.co_firstlineno + below}"


@promise("traced-forward")
@pytest.mark.parametrize(
    "forward, below, said",
    [
        (warming_up, 2, r"differs from run to run: \S*{line} calls torch.Tensor.mul\(a tensor, 2\)"),
        (scaled_by_a_global, 2, r"differs from run to run: \S*{line} calls torch.Tensor.mul"),
        (every_second, 4, r"differs from run to run: \S*{line} calls \S*linear.* where in the run before"),
        (layer_drop, 1, r"draws from random \(\S*{line}\)"),
        (noise_of_numpy, 1, r"draws from numpy\.random \(\S*{line}\)"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_differs_from_run_to_run_cannot_be_traced(forward, below, said):
    model, before = Layer(forward), (random.getstate(), np.random.get_state()[1].tolist())
    with pytest.raises(TraceError, match=said.format(line=line_of(forward, below))):
        trace(model, (torch.randn(2, 4),))
    assert (model.steps, model.seen, model.rows) == (0, [], None)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@promise("traced-forward")
@pytest.mark.parametrize(
    "forward, below, said",
    [
        (counting, 1, r"changes steps in every run \(\S*{line}\)"),
        (remembering, 2, r"changes seen in every run \(\S*{line}\)"),
        (hooked_inside, 2, r"sets a hook on a tensor \(\S*{line}\)"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_only_python_does_is_refused_by_a_graph(ranks, forward, below, said):
    ranks(2).run(refused_by_a_graph, forward.__name__, said.format(line=line_of(forward, below)))


def refused_by_a_graph(group, forward, said):
    torch.manual_seed(0)
    model, x = Layer(globals()[forward]), torch.randn(2, 4)
    plan = propagate(trace(model, (x,)), mesh_of((2,)), objective="redistribution")
    assert model.steps == 0
    with pytest.raises(ValueError, match=rf"the forward of Layer {said}, which a graph leaves out"):
        ShardedModule(model, plan)
    if forward == "counting":  # in Python it counts
        eager = parallelize(model, plan)
        eager(x)
        eager(x)
        assert eager.steps == 2


def test_what_a_forward_may_do_goes_through():
    model = Layer(harmless)
    assert trace(model, (torch.randn(2, 4),)).only_in_python == ""


def uncopied(self, x):
    return self.linear(x)


def test_what_could_not_be_compared_is_said(caplog):
    model = Layer(uncopied)
    model.lock = threading.Lock()
    assert trace(model, (torch.randn(2, 4),)).only_in_python == ""
    assert "whether the forward of Layer does the same every time was not checked: TypeError" in caplog.text


@on_ranks(2)
def test_a_training_step_refuses_a_model_that_counts(group):
    """The model itself changes an attribute: a training step runs the model inside its loss module."""
    torch.manual_seed(0)
    model, x = Layer(counting), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    optimizer, strategy = torch.optim.SGD(model.parameters(), lr=0.1), Strategy(mode="data", mesh={"dp": 2})
    with pytest.raises(ValueError, match=rf"changes steps in every run \(\S*{line_of(counting, 1)}\)"):
        train_step(model, (x,), optimizer, strategy, loss=squared)


def zeroed(gradient):
    return gradient * 0


@promise("gradient-hooks")
@pytest.mark.parametrize("static", [True, False], ids=["graph", "eager"])
@on_ranks(2)
def test_hooks_on_gradients_are_refused_by_name(group, static):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        handle = register(model[2].weight, zeroed)
        with pytest.raises(ValueError, match=r"2\.weight has a hook on its gradient, which would not run"):
            shard = ShardedModule if static else parallelize
            shard(model, propagate(trace(model, (x,)), mesh_of((2,)), objective="redistribution"))
        optimizer, strategy = torch.optim.SGD(model.parameters(), lr=0.1), Strategy(mode="data", mesh={"dp": 2})
        with pytest.raises(ValueError, match=r"2\.weight has a hook on its gradient"):
            train_step(model, (x,), optimizer, strategy, loss=squared, static=static)
        handle.remove()
        train_step(model, (x,), optimizer, strategy, loss=squared, static=static).close()


def squared(model, x):
    return model(x).square().mean()


@promise("gradient-hooks")
@pytest.mark.sample(1)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@on_ranks(2)
def test_hooks_on_parts_whose_gradients_are_summed_later_are_refused(group, zero_stage):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        strategy = Strategy(mode="data", mesh={"dp": 2}, sharding=ShardingOptions(zero_stage=zero_stage))
        step = train_step(model, (x,), torch.optim.SGD(model.parameters(), lr=0.1), strategy, loss=squared)
        step(x)
        handle = register(step.modules[0].get_parameter("2.weight"), zeroed)
        with pytest.raises(
            RuntimeError, match=r"2\.weight has a hook on its gradient, and the gradient is summed over ranks"
        ):
            step(x)
        handle.remove()
        step(x)
        step.close()
