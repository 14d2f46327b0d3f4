"""train_step: strategies alone and combined, against the whole model trained in float64 by one process."""

import gpt
import modes
import pytest
import torch
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

STEPS = 10
COLUMNS, ROWS = ([None, ("tp", 1)], None), ([None, (1, "tp")], None)
MEGATRON = {"layers.*.qkv": COLUMNS, "layers.*.up": COLUMNS, "layers.*.o": ROWS, "layers.*.down": ROWS}
TP = {"mode": "semi_auto", "mesh": {"dp": 2, "tp": 2}, "operators": MEGATRON}
LAYERS = Recompute(modules=["layers.*"])


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
    worst = max(farthest(shard, state[name]) for name, shard in step.tensor_shards().items())
    step.close()
    return losses, expected, worst


def farthest(shard, whole):
    box = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))
    return (shard.local - whole[box]).abs().max().item() if shard.local.numel() else 0.0


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
        "gradient_merge": GradientMerge(steps=5, average=False),
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


@pytest.mark.sample(1)
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


def uneven(_group):
    """Train on 3 ranks, which divide no size."""
    return trained(_group, {"mode": "data", "mesh": {"dp": 3}, "sharding": ShardingOptions(zero_stage=2)})


@pytest.mark.slow
def test_three_ranks(ranks):
    check(ranks(3).run(uneven))


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
    found, expected = [], []
    for _ in range(STEPS):
        found.append(step(part).item())
        loss = modes.mean_square(whole, x)
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    step.close()
    state = {"up": whole.up.weight.detach(), "down": whole.down.weight.detach()}
    return found, expected, max(farthest(shard, state[name]) for name, shard in mine.tensor_shards().items())


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


def mixed_precision(_group, dtype):
    """Train in 16 bits with fp32 master weights; return losses of this and of fp32 training."""
    torch.manual_seed(0)
    model = gpt.GPT()
    options = {
        "mode": "data",
        "mesh": {"dp": 2},
        "amp": AmpOptions(dtype=dtype),
        "sharding": ShardingOptions(zero_stage=1),
    }

    def loss_of(model, tokens, targets):
        return model(tokens, targets).float()

    step = train_step(
        model, gpt.batch_of(0), torch.optim.AdamW(model.parameters(), lr=1e-3), Strategy(**options), loss=loss_of
    )
    found = [step(*gpt.batch_of(number)).item() for number in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for number in range(STEPS):
        loss = model(*gpt.batch_of(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    dtypes = {parameter.dtype for module in step.modules for parameter in module.parameters()}
    state = {
        shard.local.dtype
        for name, shard in step.optimizer.tensor_shards().items()
        if name.endswith(("exp_avg", "master"))
    }
    step.close()
    return found, expected, dtypes, state


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_with_master_weights(ranks, dtype):
    for found, expected, dtypes, state in ranks(2).run(mixed_precision, dtype):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
        assert found[-1] < found[0]
        assert dtypes == {getattr(torch, dtype)}
        assert state == {torch.float32}


def refused(_group, options, more):
    model, optimizer = model_and_optimizer()
    try:
        train_step(model, gpt.batch_of(0), optimizer, Strategy(**options), **more)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"mode": "data", "mesh": {"dp": 4}}, {}, "the strategy is for 4 ranks"),
        ({"mode": "semi_auto", "mesh": {"dp": 2}}, {}, "without any operator's strategy"),
        ({"mode": "data", "mesh": {"dp": 2}, "recompute": LAYERS}, {"static": False}, "recompute with static=False"),
        ({"mode": "data", "mesh": {"dp": 2}, "pipeline": PipelineOptions(micro_batches=3)}, {}, "micro_batches=3"),
        ({"mode": "hybrid", "mesh": {"dp": 1, "tp": 2}}, {}, "by a method tensor_shards()"),
        ({"mode": "data", "mesh": {"dp": 2}, "amp": AmpOptions(dtype="float16")}, {}, "a loss in float16"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ranks, options, more, message):
    assert all(message in message for message in ranks(2).run(refused, options, more))
