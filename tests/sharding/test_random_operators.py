"""Tests random operators of a planned model on ranks with different seeds, which data loading needs."""

import pytest
import torch
import torch.distributed as dist
from marks import promise
from pool import on_ranks
from torch import nn

from ascend_parallel.sharding import ProcessMesh, ShardedModule, manual_seed, parallelize, propagate, trace
from ascend_parallel.training import PipelineOptions, Recompute, Strategy, train_step


class Dropping(nn.Module):
    """Blocks of two products, and something random between them."""

    def __init__(self, drop, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(16, 32), drop, nn.Linear(32, 16)]) for _ in range(blocks))

    def forward(self, x, target):
        for up, drop, down in self.blocks:
            x = x + down(drop(up(x).tanh()))
        return (x - target).square().mean()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (4, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) * 0.1 + torch.rand(16, dtype=x.dtype)


class Dropping2d(nn.Dropout2d):
    def forward(self, x):
        return super().forward(x.unsqueeze(-1)).squeeze(-1)


RANDOM = {
    "dropout": lambda: nn.Dropout(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "dropout of features": lambda: Dropping2d(0.3),
    "attention": lambda: nn.Sequential(nn.Linear(32, 16), Attending(), nn.Linear(16, 32)),
    "noise": lambda: nn.Sequential(nn.Linear(32, 16), Noisy(), nn.Linear(16, 32)),
}
STRATEGIES = {
    "auto, tp": {"mode": "auto", "mesh": {"dp": 1, "tp": 2}, "hardware": "cpu-gloo"},
    "tp": {
        "mode": "semi_auto",
        "mesh": {"dp": 1, "tp": 2},
        "operators": {"blocks.*.0": (([None, None, ("tp", 1)], None)), "blocks.*.2": ([None, None, (1, "tp")], None)},
    },
    "data": {"mode": "data", "mesh": {"dp": 2}},
}


def model_of(kind):
    torch.manual_seed(5)
    return Dropping(RANDOM[kind]()).double()


def batch_of(number):
    return tuple(torch.randn(2, 4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(number)))


def step_of(group, kind, options, **more):
    """Return a step of a model with the same parameters on all ranks, which then get different seeds."""
    model = model_of(kind)
    torch.manual_seed(100 + group.rank())
    return train_step(model, batch_of(0), torch.optim.SGD(model.parameters(), lr=0.1), Strategy(**options), **more)


def trained(group, kind, options, more, count=3):
    torch.rand(group.rank())  # their generators stand elsewhere, too
    step = step_of(group, kind, options, **more)
    losses = [step(*batch_of(number)).item() for number in range(count)]
    held = {
        (name, piece.offsets, tuple(piece.local.shape)): piece.local.tolist()
        for name, piece in step.tensor_shards().items()
    }
    step.close()
    return losses, held


def agree(found):
    """Assert that all ranks have the same loss, and equal replicas of every tensor."""
    assert all(losses == found[0][0] for losses, _ in found)
    assert len(set(found[0][0])) == len(found[0][0])
    for _, held in found:
        for _, others in found:
            assert all(held[box] == others[box] for box in held.keys() & others.keys())


@promise("random-masks")
@pytest.mark.sample(2)
@pytest.mark.parametrize("static", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", RANDOM)
def test_ranks_seeded_apart_stay_one_model(ranks, kind, static):
    for options in (STRATEGIES["auto, tp"], STRATEGIES["data"]):
        agree(ranks(2).run(trained, kind, options, {"static": static}))


@pytest.mark.slow
def test_recomputed_regions_draw_what_they_drew_and_stages_what_the_whole_does(ranks):
    whole = {"mode": "data", "mesh": {"dp": 1}, "pipeline": PipelineOptions(micro_batches=2)}
    (plain, _), *_ = ranks(1).run(trained, "dropout", whole, {})
    again = {**whole, "recompute": Recompute(modules=["blocks.*"])}
    (recomputed, _), *_ = ranks(1).run(trained, "dropout", again, {})
    assert recomputed == plain
    pipeline = PipelineOptions(degree=2, micro_batches=2, stages={"blocks.0": 0, "blocks.1": 1})
    staged = {**whole, "pipeline": pipeline}
    found = ranks(2).run(trained, "dropout", staged, {})
    assert [losses for losses, _ in found] == [pytest.approx(plain, rel=1e-12)] * 2


def resumed(group, folder, options):
    step = step_of(group, "dropout", options)
    step(*batch_of(0))
    step.save(folder)
    step.evaluate(*batch_of(9))
    went_on = [step(*batch_of(number)).item() for number in (1, 2)]
    step.close()
    torch.manual_seed(7 * group.rank())
    other = step_of(group, "dropout", options)
    other.load(folder)
    found = [other(*batch_of(number)).item() for number in (1, 2)]
    other.close()
    return went_on, found


@promise("resume-bits")
def test_a_checkpoint_goes_on_drawing_bit_for_bit(ranks, tmp_path):
    for went_on, found in ranks(2).run(resumed, tmp_path, STRATEGIES["auto, tp"]):
        assert found == went_on


@promise("random-masks")
@pytest.mark.parametrize("static", [True, False], ids=["graph", "eager"])
@on_ranks(2)
def test_masks_differ_between_pieces_and_forwards_and_follow_the_seed(group, static):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Dropout(0.5))
    x = torch.ones(64, 64)
    mesh = ProcessMesh(list(range(group.size())), dim_names=["x"])
    plan = propagate(trace(model, (x,)), mesh, {"0": ([("x", 1)], None)}, objective="redistribution")
    torch.manual_seed(group.rank())
    module = (ShardedModule if static else parallelize)(model, plan)
    first, second = module(x), module(x)
    manual_seed(module, 3)
    third = module(x)
    manual_seed(module, 3)
    fourth = module(x)
    with pytest.raises(ValueError, match=r"seed=-1: give a whole number"):
        manual_seed(module, -1)
    with pytest.raises(ValueError, match="Linear was not made by parallelize"):
        manual_seed(nn.Linear(2, 2), 1)
    everybody = [torch.empty_like(first) for _ in range(group.size())]
    dist.all_gather(everybody, first)
    assert all(torch.equal(one, first) for one in everybody)
    assert torch.equal(third, fourth)
    halves = first.chunk(group.size())
    assert not torch.equal(first, second) and not torch.equal(halves[0], halves[1]) and not torch.equal(first, third)
    assert first.mean() == pytest.approx(1, abs=0.1)
