"""Stages on meshes of different shapes train as the whole model on one rank does: losses, norms, every parameter."""

import copy

import gpt
import pytest
import torch
from crossing_model import STAGES, Crossing, crossing_batch
from mesh_stages import ACROSS, LINE, SMALL, SQUARE, Two, pipeline, rows_of, semi_auto
from one_card import box_of
from torch import nn

from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.training import (
    OverlapOptions,
    ShardingOptions,
    Strategy,
    train_step,
)

STEPS = 4


def check_state(step, whole):
    """Compare each shard that this rank holds with its place in the whole model."""
    state = whole.state_dict()
    shards = step.tensor_shards()
    for name, shard in shards.items():
        torch.testing.assert_close(shard.local.detach(), state[name][box_of(shard)], rtol=1e-8, atol=1e-10)
    return set(shards)


def train(_group, options, make, batch_of, steps=STEPS):
    """Train on one batch after another beside the whole model; return losses, norms, names of the rank's state."""
    torch.manual_seed(0)
    whole = make().double()
    strategy = Strategy(**{"max_norm": 0.05, **options})
    given = copy.deepcopy(whole)
    step = train_step(given, batch_of(0), torch.optim.AdamW(given.parameters(), lr=1e-2), strategy)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    found = []
    for number in range(steps):
        ours = step(*batch_of(number)).item()
        expected = whole(*batch_of(number))
        theirs.zero_grad()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), strategy.max_norm).item()
        theirs.step()
        found.append((ours, expected.item(), step.optimizer.norm, norm))
    names = check_state(step, whole)
    with torch.no_grad():
        expected = whole.eval()(*batch_of(9)).item()
    found.append((step.evaluate(*batch_of(9)).item(), expected, 1, 1))
    step.close()
    return found, names


def check(results, steps=STEPS):
    for found, names in results:
        assert len(found) == steps + 1
        assert names
        for ours, theirs, norm, expected in found:
            assert ours == pytest.approx(theirs, rel=1e-9)
            assert norm == pytest.approx(expected, rel=1e-9)


CASES = {
    "gpipe, zero 2": semi_auto(LINE, SQUARE, schedule="gpipe", sharding=ShardingOptions(zero_stage=2)),
    "interleaved, zero 3": semi_auto(
        SQUARE, ACROSS, schedule="interleaved_1f1b", virtual_stages=2, sharding=ShardingOptions(zero_stage=3)
    ),
    "zero bubble, zero 1 by parameters": semi_auto(
        *(SQUARE, LINE),
        schedule="zero_bubble",
        virtual_stages=2,
        overlap=OverlapOptions(operators=False),
        sharding=ShardingOptions(zero_stage=1, partition_by="parameters"),
    ),
    "zbv": semi_auto(ACROSS, LINE, schedule="zbv", virtual_stages=2, overlap=OverlapOptions(operators=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_gpt_on_8_ranks(ranks, case):
    """The embedding is tied to the head, on the other mesh."""
    check(ranks(8).run(train, CASES[case], gpt.GPT, gpt.batch_of))


def crossed(number):
    return crossing_batch(48, torch.Generator().manual_seed(number))


def auto(*meshes, **options):
    return {"mode": "auto", "pipeline": pipeline(*meshes, stages=STAGES, **options)}


# Ranks, meshes that cut what crosses the stages in different ways, also unevenly (3 ranks of a mesh), and the schedule.
THREE_STAGES = [
    (4, ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}, {"dp": 1, "tp": 1}), "1f1b"),
    (6, ({"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}), "gpipe"),
    (6, ({"dp": 3, "tp": 1}, {"dp": 1, "tp": 1}, {"dp": 2, "tp": 1}), "1f1b"),
    (6, ({"dp": 1, "tp": 3}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}), "gpipe"),
    (8, (LINE, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}), "gpipe"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "meshes", "schedule"), THREE_STAGES)
def test_three_stages_of_different_shapes_and_numbers_of_ranks(ranks, count, meshes, schedule):
    """Several tensors between stages, one that skips a stage, a mask, a parameter that all stages share."""
    check(ranks(count).run(train, auto(*meshes, schedule=schedule), Crossing, crossed))


def test_stages_of_two_ranks_and_of_one(ranks):
    check(ranks(3).run(train, SMALL, Two, rows_of))


def counted(model, x, y):
    """A sum and a count, which differs between micro-batches."""
    kept = x[:, 0] > 0
    return ((model.last(torch.tanh(model.first(x))) - y).square().sum(-1) * kept).sum(), kept.sum()


def own_parts(strategy, group, batch):
    """Return this rank's rows of each micro-batch, joined."""
    at, parts = strategy.data_rank(group.rank()), strategy.pipeline.micro_batches
    return tuple(torch.cat([part.chunk(2)[at] for part in tensor.chunk(parts)]) for tensor in batch)


def local(group, wrong):
    torch.manual_seed(0)
    meshes = {"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}
    whole, strategy = Two().double(), Strategy(pipeline=pipeline(*meshes, micro_batches=3))
    given = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    step = train_step(given, rows_of(0), optimizer, strategy, loss=counted, local_batches=True)
    found = []
    for number in range(3):
        own = own_parts(strategy, group, rows_of(number + 7 * (group.rank() == wrong)))
        if wrong is not None:
            with pytest.raises(DisagreementError, match=r"ranks 0, 2, 3 are one replica|ranks 1, 4, 5 are one replica"):
                step(*own)
            continue
        ours = step(*own).item()
        total, count = counted(whole, *rows_of(number))
        whole.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.1 * parameter.grad
        found.append((ours, (total / count).item()))
    if wrong is None:
        check_state(step, whole)
    step.close()
    return found


@pytest.mark.slow
def test_each_rank_gives_its_own_part_of_a_batch_and_the_loss_counts(ranks):
    for found in ranks(6).run(local, None):
        assert [ours for ours, _ in found] == pytest.approx([theirs for _, theirs in found], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 4])
def test_another_part_of_the_batch_on_another_mesh_is_seen(ranks, wrong):
    ranks(6).run(local, wrong)
