"""Tests shard_layer and shard_optimizer against the same training in a single process, in float64."""

import pytest
import torch
from one_card import losses_of
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.sharding.marked.dtensors import shard_tensor, unshard
from ascend_parallel.sharding.marked.shard_layer import (
    ShardingStage1,
    ShardingStage3,
    clip_grad_value_,
    shard_layer,
    shard_optimizer,
)
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.collectives import recorded

STEPS = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def squares(net, x):
    return (net(x) ** 2).sum()


def trained():
    """The truth: losses, parameters and Adam's first moments."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = losses_of(net, optimizer, zip(data()), squares)
    return losses, list(net.parameters()), [optimizer.state[one]["exp_avg"] for one in net.parameters()]


def column_and_row(path, module, mesh):
    """Cut the first linear's outputs and the second's inputs along mp."""
    if isinstance(module, nn.Linear):
        cut = Shard(0) if path == "0" else Shard(1)
        module.weight = shard_tensor(module.weight, mesh, [Replicate(), cut])
        if path == "0":
            module.bias = shard_tensor(module.bias, mesh, [Replicate(), cut])


def training(group, shard_fn):
    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    net = shard_layer(
        model(),
        mesh,
        column_and_row,
        input_fn=lambda inputs, mesh: (shard_tensor(inputs[0], mesh, [Shard(0), Replicate()]),),
        output_fn=lambda output, mesh: output**2,
    )
    optimizer = shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.1), shard_fn)
    losses = []
    for x in data():
        loss = unshard(net(x).sum())
        optimizer.zero_grad()
        assert all(one.grad is None for one in net.parameters())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = list(net.parameters())
    moments = [optimizer.state[one]["exp_avg"] for one in parameters]
    assert optimizer.param_groups[0]["params"] == parameters
    assert len(optimizer.state_dict()["state"]) == 4
    placed = [one.placements for one in (*parameters, *moments)]
    return losses, [unshard(one.detach()) for one in parameters], [unshard(one) for one in moments], placed


@pytest.mark.parametrize("shard_fn", [None, ShardingStage1("dp")], ids=["own placements", "stage 1"])
def test_training_is_as_in_one_process(ranks, shard_fn):
    losses, parameters, moments = trained()
    own = [(Replicate(), Shard(0)), (Replicate(), Shard(0)), (Replicate(), Shard(1)), (Replicate(), Replicate())]
    for found, held, averages, placed in ranks(4).run(training, shard_fn):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(held, [one.detach() for one in parameters], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(averages, moments, rtol=1e-10, atol=1e-12)
        assert placed[:4] == own
        if shard_fn is None:
            assert placed[4:] == own
        else:
            # of the first bias, whose only dimension is cut along mp already, the state stays the parameter's
            cut = [(Shard(1), Shard(0)), own[1], (Shard(0), Shard(1)), (Shard(0), Replicate())]
            assert placed[4:] == cut


def by_adagrad(group, stage, clips):
    """Train with Adagrad, whose state is there before the first step, and clipped values."""
    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    net = shard_layer(model(), mesh, column_and_row)
    optimizer = shard_optimizer(torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1), stage)
    losses = []
    for x in data():
        loss = unshard((net(shard_tensor(x, mesh, [Shard(0), Replicate()])) ** 2).sum())
        optimizer.zero_grad()
        loss.backward()
        if clips:
            clip_grad_value_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    sizes = [optimizer.state[each]["sum"].to_local().numel() for each in net.parameters()]
    return losses, sizes


@pytest.mark.parametrize(
    ("stage", "clips"), [(None, True), (ShardingStage1("dp"), True), (ShardingStage3("dp"), False)]
)
def test_adagrad_and_clipped_values(ranks, stage, clips):
    net = model()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1)
    if clips:
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(net.parameters(), 0.5))
    expected = losses_of(net, optimizer, zip(data()), squares)
    for losses, sizes in ranks(4).run(by_adagrad, stage, clips):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        assert sizes == ([24, 4, 24, 6] if stage is None else [12, 4, 12, 3])


@on_ranks(2)
def test_stage_1_reduces_and_gathers_once(group):
    """Stage 1: a reduce-scatter of the gradient and an all-gather of the parameter, nothing for the state."""
    mesh = ProcessMesh([0, 1], dim_names=["dp"])
    net = shard_layer(nn.Linear(512, 1024, bias=False), mesh)
    optimizer = shard_optimizer(torch.optim.AdamW(net.parameters()), ShardingStage1("dp"))
    x = shard_tensor(torch.ones(4, 512), mesh, [Shard(0)])
    unshard(net(x).sum()).backward()
    with recorded() as moved:
        optimizer.step()
    moved, held = [(one.kind, one.nbytes) for one in moved], optimizer.state[net.weight]["exp_avg"].to_local().shape
    assert moved == [("reduce_scatter", 1 << 20), ("all_gather", 1 << 20)]
    assert held == (512, 512)


@on_ranks(2)
def test_tied_parameters_and_what_is_refused(group):
    mesh = ProcessMesh([0, 1])
    net = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4))
    net[1].weight = net[0].weight
    shard_layer(net, mesh)
    assert net[1].weight is net[0].weight
    assert all(isinstance(one, DTensor) for one in (*net.parameters(), *net.buffers()))
    assert isinstance(net[0].weight, nn.Parameter)
    net = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4, bias=False))
    net[1].weight = net[0].weight

    def cut(path, module, mesh):
        if path:
            module.weight = shard_tensor(module.weight, mesh, [Shard(int(path))])

    with pytest.raises(ValueError, match=r"several marks \(0.weight \[Shard\(dim=0\)\]; 1.weight \[Shard\(dim=1\)\]\)"):
        shard_layer(net, mesh, cut)
    with pytest.raises(ValueError, match="use shard_layer first"):
        shard_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has stepped"):
        shard_optimizer(optimizer)
