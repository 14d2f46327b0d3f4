"""train_step: strategies alone and combined, against the whole model trained in float64 by one process."""

import re

import gpt
import modes
import pytest
import torch
from mesh_stages import MEGATRON, SQUARE
from one_card import farthest, losses_of
from pool import on_ranks
from torch import nn

from ascend_parallel.training import (
    AmpOptions,
    CommFusion,
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    Recompute,
    ShardingOptions,
    Strategy,
    train_step,
)

STEPS = 6
TP = {"mode": "semi_auto", "mesh": SQUARE, "operators": MEGATRON}
LAYERS = Recompute(modules=["layers.*"])
PAIR = PipelineOptions(degree=2, micro_batches=2)


def model_and_optimizer():
    torch.manual_seed(0)
    model = gpt.GPT().double()
    wide = [parameter for name, parameter in model.named_parameters() if parameter.ndim > 1]
    narrow = [parameter for name, parameter in model.named_parameters() if parameter.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def trained_whole(options, steps=STEPS):
    """Return losses and state of the whole model."""
    model, optimizer = model_and_optimizer()
    norm, merge = options.get("max_norm"), options.get("gradient_merge", GradientMerge())
    losses = []
    for number in range(steps):
        loss = model(*gpt.batch_of(number))
        (loss / merge.steps if merge.average else loss).backward()
        losses.append(loss.item())
        if (number + 1) % merge.steps == 0:
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def trained(_group, options, more=None):
    """Return this rank's losses, and the largest error of its state against the whole model's."""
    model, optimizer = model_and_optimizer()
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy(**options), **(more or {}))
    losses = [step(*gpt.batch_of(number)).item() for number in range(STEPS)]
    expected, state = trained_whole(options)
    worst = farthest(step.tensor_shards(), state)
    step.close()
    return losses, expected, worst


def check(found):
    for losses, expected, worst in found:
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        assert worst < 1e-9


ALONE = {
    "data": {"mode": "data", "mesh": {"dp": 4}},
    "auto from nothing": {"mode": "auto", "mesh": {"dp": 2, "tp": 2}, "hardware": "cpu-gloo"},
    "semi_auto": TP,
    "recompute": {**TP, "recompute": Recompute(modules=["layers.*"], keep=["layers.*:scaled_dot_product_attention"])},
    "zero 1": {**TP, "sharding": ShardingOptions(zero_stage=1), "max_norm": 0.3},
    "zero 3": {**TP, "sharding": ShardingOptions(zero_stage=3), "max_norm": 0.3},
    "zero 1 by parameters": {**TP, "sharding": ShardingOptions(zero_stage=1, partition_by="parameters")},
    "gradient merge": {**TP, "gradient_merge": GradientMerge(steps=2)},
    "gradient merge by sum, zero 2": {
        **TP,
        "gradient_merge": GradientMerge(steps=3, average=False),
        "sharding": ShardingOptions(zero_stage=2),
        "max_norm": 1.0,
    },
    "micro-batches": {**TP, "pipeline": PipelineOptions(micro_batches=4)},
    "no overlap": {**TP, "overlap": OverlapOptions(operators=False, gradients=False)},
    "no fusion": {**TP, "comm_fusion": CommFusion(bucket_mb=0), "fused_passes": ("matmul_add",)},
    "pipeline, zero 2": {
        "mode": "data",
        "mesh": {"dp": 2},
        "pipeline": PipelineOptions(degree=2, micro_batches=2, schedule="gpipe"),
        "sharding": ShardingOptions(zero_stage=2),
        "max_norm": 0.3,
    },
    "interleaved pipeline": {
        "mode": "data",
        "mesh": {"dp": 2},
        "pipeline": PipelineOptions(degree=2, micro_batches=4, schedule="interleaved_1f1b", virtual_stages=2),
        "recompute": LAYERS,
    },
}


@pytest.mark.sample("data", "zero 3")
@pytest.mark.parametrize("name", ALONE)
def test_training_on_four_ranks_is_that_of_one(ranks, name):
    check(ranks(4).run(trained, ALONE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.stress)])
def test_data_tensor_and_pipeline_parallel_together_on_eight_ranks(ranks, zero_stage):
    pipeline, sharding = PipelineOptions(degree=2, micro_batches=4), ShardingOptions(zero_stage=zero_stage)
    together = {**TP, "pipeline": pipeline, "recompute": LAYERS, "max_norm": 0.3, "sharding": sharding}
    check(ranks(8).run(trained, together))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_models_own_code_trains_alike(ranks, zero_stage):
    options = {**TP, "sharding": ShardingOptions(zero_stage=zero_stage), "max_norm": 0.3}
    check(ranks(4).run(trained, options, {"static": False}))


@pytest.mark.slow
def test_three_ranks(ranks):
    """They divide no size."""
    options = {"mode": "data", "mesh": {"dp": 3}, "sharding": ShardingOptions(zero_stage=2)}
    check(ranks(3).run(trained, options))


def hybrid(_group):
    """Train by hand-written tensor parallelism x data parallelism; compare with the whole model."""
    torch.manual_seed(0)
    whole = modes.MLP().double()
    x = torch.randn(12, 8, dtype=torch.float64)
    strategy = Strategy(mode="hybrid", mesh={"dp": 2, "tp": 2}, sharding=ShardingOptions(zero_stage=1), max_norm=0.05)
    mesh = strategy.meshes()[0]
    mine = modes.ParallelMLP(whole, mesh.group("tp"))
    data = mesh.coordinate(torch.distributed.get_rank())[0]
    part = x.chunk(2)[data]
    step = train_step(mine, (part,), torch.optim.AdamW(mine.parameters(), lr=1e-2), strategy, loss=modes.mean_square)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    found = [step(part).item() for _ in range(STEPS)]
    expected = losses_of(whole, optimizer, [(x,)] * STEPS, modes.mean_square, max_norm=0.05)
    step.close()
    return found, expected, farthest(mine.tensor_shards(), {"up": whole.up.weight, "down": whole.down.weight})


def test_a_model_with_collectives_of_its_own(ranks):
    check(ranks(4).run(hybrid))


def all_modes(_group):
    """Run the example of the four modes."""
    return [modes.train(mode) for mode in modes.STRATEGIES]


def test_the_four_modes_train_alike(ranks):
    expected = modes.train_on_one_card()
    for found in ranks(4).run(all_modes):
        for losses in found:
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"mode": "data", "mesh": {"dp": 4}}, {}, "the strategy is for 4 ranks"),
        ({"mode": "semi_auto", "mesh": {"dp": 2}}, {}, "without any operator's strategy"),
        ({"mode": "data", "mesh": {"dp": 2}, "recompute": LAYERS}, {"static": False}, "recompute with static=False"),
        ({"mode": "data", "mesh": {"dp": 1}, "pipeline": PAIR}, {"static": False}, "pipeline.degree with static=False"),
        ({"mode": "data", "mesh": {"dp": 2}, "pipeline": PipelineOptions(micro_batches=3)}, {}, "micro_batches=3"),
        ({"mode": "hybrid", "mesh": {"dp": 1, "tp": 2}}, {}, "give the model a method tensor_shards()"),
        ({"mode": "data", "mesh": {"dp": 2}, "amp": AmpOptions(dtype="float16")}, {}, "a loss in float16"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused_by_name(_group, options, more, message):
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=re.escape(message)):
        train_step(model, gpt.batch_of(0), optimizer, Strategy(**options), **more)
