"""Batch norm in data parallelism: with the statistics of all ranks, against one card; and with each rank's own."""

import copy

import pytest
import torch
from pool import on_ranks
from sharded_models import EXACT, gradients, made, step
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.train_step import train_step


class Block(nn.Module):
    """A residual block of a ResNet, behind a first convolution; `kind` of two dimensions makes it a block of rows."""

    def __init__(self, channels=6, **options):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels, **options) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


class Rows(nn.Module):
    """Batch norms of [N, C] and [N, C, L], far from zero: a sum of squares alone would lose its digits."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Conv1d(4, 2, 1, bias=False)
        self.rows, self.columns = nn.BatchNorm1d(8, momentum=0.3), nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        y = self.rows(self.up(x) + 100)
        return self.columns(self.down(y.reshape(-1, 4, 2)))


def by_samples(dims, tensors):
    """The strategy of a norm that is sharded along the batch: so small a tensor is cheaper to gather."""
    return (("dp", *[None] * (dims - 1)), *[(None,)] * tensors), None


MODELS = {
    "block": (Block, {}, (12, 3, 6, 6), {"norms.*": by_samples(4, 4)}),
    "no statistics": (Block, {"track_running_stats": False}, (12, 3, 6, 6), {"norms.*": by_samples(4, 2)}),
    "rows": (Rows, {}, (12, 5), {"rows": by_samples(2, 4), "columns": by_samples(3, 2)}),
}


def data_parallel(model, x, mesh, strategies=None, **options):
    graph = trace(model, (x.clone().requires_grad_(),))
    options = {"objective": "redistribution", **options}
    return propagate(graph, mesh, strategies or {}, semi_auto="dp", **options)


@pytest.mark.sample("4-block")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 3, 4])
@on_ranks()
def test_the_statistics_are_those_of_the_whole_batch(group, name):
    """Compare two steps with one card, and the running statistics and an evaluation behind them."""
    kind, options, shape, strategies = MODELS[name]
    model = made(kind, **options)
    one_card, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    batches = torch.randn(2, *shape, dtype=torch.float64, generator=generator).unbind()
    mesh = ProcessMesh(list(range(group.size())), ["dp"])
    plan = data_parallel(model, batches[0], mesh, strategies)
    sharded = ShardedModule(model, plan)
    for x in batches:
        one_card.zero_grad(), sharded.zero_grad()
        torch.testing.assert_close(step(sharded, x), step(one_card, x), **EXACT)
        torch.testing.assert_close(sharded.full_gradients(), gradients(one_card), **EXACT)
    statistics = {name: sharded.local_tensor(f"b_{name.replace('.', '_')}") for name, _ in one_card.named_buffers()}
    torch.testing.assert_close(statistics, dict(one_card.named_buffers()), **EXACT)
    again = made(kind, **options)
    eager = parallelize(copy.deepcopy(again), plan)
    torch.testing.assert_close(eager(batches[0]), again(batches[0]), **EXACT)
    ran = {(event.kind, event.direction) for event in sharded.collective_counts if event.reader == "inside"}
    assert "all_to_all" not in plan.collectives()
    assert ran == {("all_reduce", "forward"), ("all_reduce", "backward")}


def test_data_parallelism_costs_its_gradients_and_the_norms_sums():
    """Before, no rule sharded the batch of a batch norm, and its activations were gathered."""
    model = made(Block, 64)
    plan = data_parallel(model, torch.zeros(64, 3, 56, 56, dtype=torch.float64), ProcessMesh(list(range(4)), ["dp"]))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    all_reduced = 2 * 3 / 4 * 8  # bytes that a rank sends for each number
    sums = 2 * (2 * 64 + 2 * 64) * all_reduced  # of two norms, in forward and backward
    assert sum(step.nbytes for steps in plan.op_collectives.values() for step in steps) == sums
    returned = sum(one.nbytes for one in plan.conversions if one.reader == "")  # the model's output, whole
    assert plan.nbytes - returned == parameters * all_reduced + sums


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_local_statistics_are_those_of_each_ranks_samples(group, name):
    """Compare with one card that normalises each rank's samples by themselves; the running statistics are averages."""
    kind, options, shape, _ = MODELS[name]
    model, count = made(kind, **options), group.size()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plan = data_parallel(model, x, ProcessMesh(list(range(count)), ["dp"]), batch_norm="local")
    sharded = ShardedModule(model, plan)
    cards = [copy.deepcopy(model) for _ in range(count)]
    y, _ = step(sharded, x)
    grad = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    parts = [card(part) for card, part in zip(cards, x.chunk(count), strict=True)]
    for part, of_part in zip(parts, grad.chunk(count), strict=True):
        part.backward(of_part)
    torch.testing.assert_close(y, torch.cat(parts), **EXACT)
    summed = {name: sum(gradients(card)[name] for card in cards) for name in gradients(model)}
    torch.testing.assert_close(sharded.full_gradients(), summed, **EXACT)
    for name, _ in model.named_buffers():
        found = sharded.local_tensor(f"b_{name.replace('.', '_')}")
        of_cards = torch.stack([card.get_buffer(name).double() for card in cards])
        torch.testing.assert_close(found.double(), of_cards.mean(0), **EXACT)
    assert not plan.op_collectives


def test_other_statistics_are_refused():
    with pytest.raises(ValueError, match="batch_norm='ddp': give one of sync, local"):
        data_parallel(made(Block), torch.zeros(8, 3, 6, 6).double(), ProcessMesh([0, 1], ["dp"]), batch_norm="ddp")
    plan = data_parallel(made(Block), torch.zeros(8, 3, 6, 6).double(), ProcessMesh([0, 1], ["dp"]), batch_norm="local")
    with pytest.raises(ValueError, match="use ShardedModule"):
        parallelize(made(Block), plan)
    with pytest.raises(StrategyOptionError, match="batch_norm"):
        Strategy(batch_norm="ddp")


@pytest.mark.parametrize("statistics", ["sync", "local"])
@on_ranks(2)
def test_a_strategy_trains_and_evaluates(group, statistics):
    """Two ranks with statistics of their own differ from one card; both runs have the same."""
    model = made(Block).float()
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    one_card = copy.deepcopy(model)
    strategy = Strategy(mode="data", mesh={"dp": group.size()}, batch_norm=statistics)
    train = train_step(
        model, (x,), torch.optim.SGD(model.parameters(), lr=0.1), strategy, loss=lambda m, x: m(x).mean()
    )
    optimizer, losses = torch.optim.SGD(one_card.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = one_card(x).mean()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), train(x).item()))
    one_card.eval()
    losses.append((one_card(x).mean().item(), train.evaluate(x).item()))
    same = [mine == pytest.approx(theirs, rel=1e-5) for mine, theirs in losses]
    assert all(same) if statistics == "sync" else not all(same)
