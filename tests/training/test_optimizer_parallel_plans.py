"""Optimizer parallel over planned models, against the whole model's training in float64."""

import pytest
import small_models
import torch
from allocations import _Watch
from sharded_models import BATCHES, CHUNKS, made, mesh_of, planned, tokens_of
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.optimizer import ParallelOptimizer, module_targets, optimizer_factory, sharded_parameters

STEPS = 10


def adamw(model):
    """Decay on matrices only, as usual."""
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def prepared(name, mesh_shape, zero_stage):
    """Return a model, a batch and a plan: data parallel along dp, Megatron-core's layers along mp if that is there."""
    whole = made(getattr(small_models, name))
    if len(mesh_shape) == 2:
        batch = BATCHES[name](torch.Generator().manual_seed(7))
        plan = planned(name, trace(whole, batch), mesh_of(mesh_shape))
    else:
        batch = [tokens_of(6, torch.Generator().manual_seed(7)) for _ in range(2)]
        plan = propagate(
            trace(whole, batch),
            ProcessMesh(list(range(*mesh_shape)), ["dp"]),
            {},
            semi_auto="dp",
            objective="redistribution",
        )
    return whole, batch, sharded_parameters(plan, "dp") if zero_stage == 3 else plan


def train_whole(model, batch, max_norm):
    optimizer, found = adamw(model), []
    for _ in range(STEPS):
        loss = model(*batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def train(group, name, mesh_shape, zero_stage, partition_by="slices", unreduced=True, overlap=True):
    max_norm = 0.7
    whole, batch, plan = prepared(name, mesh_shape, zero_stage)
    sharded = ShardedModule(whole, plan, overlap=overlap, settings=Settings(**CHUNKS))
    made_of = optimizer_factory(adamw(whole), whole)
    truth = train_whole(whole, batch, max_norm)
    optimizer = ParallelOptimizer(
        module_targets(sharded, "dp"),
        made_of,
        zero_stage=zero_stage,
        partition_by=partition_by,
        max_norm=max_norm,
        unreduced=unreduced,
        bucket_bytes=3000,
    )
    found = []
    for _ in range(STEPS):
        if unreduced:
            with sharded.no_sync("dp"):
                loss = sharded(*batch)
                loss.backward()
        else:
            loss = sharded(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), optimizer.norm))
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)
    assert any(norm > max_norm for _, norm in truth)
    assert truth[-1][0] < truth[0][0]
    torch.testing.assert_close(sharded.full_state_dict(), dict(whole.state_dict()), rtol=1e-7, atol=1e-9)
    return sum(param.numel() for param in sharded.parameters()), sum(param.numel() for param in whole.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_stage", "partition_by", "unreduced"), [(1, "slices", False), (1, "parameters", True), (2, "slices", True)]
)
def test_gpt_on_a_plane(ranks, zero_stage, partition_by, unreduced):
    ranks(4).run(train, "GPT", (2, 2), zero_stage, partition_by, unreduced)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_zero_stage_3(ranks, mesh_shape):
    count = torch.Size(mesh_shape).numel()
    held = ranks(count).run(train, "GPT", mesh_shape, 3, "slices", True)
    print(held)


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
