"""Tensors that autograd keeps if backward gathers parameters a second time."""

import gc

import pytest
import torch
import torch.distributed as dist
from allocations import _Watch
from pool import on_ranks
from sharded_models import CHUNKS, made, mesh_of
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.sharding.mesh import ProcessMesh
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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("collectives", ["keep", "recompute"])
@on_ranks(2)
def test_recompute_gathers_weights_a_second_time(group, collectives):
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
    assert shapes.count((12, 8)) + shapes.count((8, 12)) == 0
    assert gathers == 12


@pytest.mark.parametrize("what", ["input", "scale"])
@on_ranks(2)
def test_a_change_of_a_saved_tensor_is_refused(group, what):
    sharded, x = built()
    loss = sharded(x)
    with torch.no_grad():
        {"input": x, "scale": sharded.scale}[what].mul_(3)
    with pytest.raises(RuntimeError, match=r"was changed in place after forward|has been modified inplace"):
        loss.backward()


class Wide(nn.Module):
    """Much more weight than activations; two matmuls of the same input, run as one matmul."""

    def __init__(self, layers=4, width=256):
        super().__init__()
        self.one = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.two = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for first, second in zip(self.one, self.two, strict=True):
            x = torch.tanh(first(x)) + second(x).sin()
        return x.square().sum()


def kept_for_backward(group, mesh_shape, frozen):
    """Return, with and without gathering again, the bytes that a forward keeps, and gradients that agree."""
    torch.manual_seed(1)
    model = Wide().double()
    if frozen:
        model.one.requires_grad_(False)
    x = torch.randn(12, 256, dtype=torch.float64, requires_grad=True)
    graph, found, gradients = trace(model, (x,)), [], []
    if len(mesh_shape) == 2:
        columns = dict.fromkeys(("one.*", "two.*"), ((("dp", None), ("mp", None)), None))
        plan = propagate(graph, mesh_of(mesh_shape), columns, objective="redistribution")
    else:
        rows = dict.fromkeys(("one.*", "two.*"), ((("dp", None), (None, None)), None))
        plan = propagate(graph, ProcessMesh(list(range(*mesh_shape)), ["dp"]), rows, objective="redistribution")
    model(x).backward()
    truth = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for regather in (True, False):
        sharded = ShardedModule(model, sharded_parameters(plan, regather=regather), settings=Settings(**CHUNKS))
        sharded(x.detach().requires_grad_())
        losses = []
        with _Watch() as watch:
            losses.append(sharded(x.detach().requires_grad_()))
            found.append(watch.alive)
            losses[0].backward()
        torch.testing.assert_close(sharded.full_gradients(), truth, rtol=1e-10, atol=1e-12)
        gradients.append({name: param.grad for name, param in sharded.named_parameters() if param.grad is not None})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    weights = sum(param.numel() for param in model.parameters()) * 8
    return found, weights // (mesh_shape[1] if len(mesh_shape) == 2 else 1)


@pytest.mark.parametrize(("mesh_shape", "frozen"), [((2,), False), ((3,), True), ((2, 2), False)])
def test_gathered_weights_are_not_kept(ranks, mesh_shape, frozen):
    for (again, kept), weights in ranks(torch.Size(mesh_shape).numel()).run(kept_for_backward, mesh_shape, frozen):
        assert kept - again >= 0.95 * weights
        assert again < 0.1 * weights
