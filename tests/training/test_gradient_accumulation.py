"""16-bit gradients of many micro-batches accumulate in fp32, with every runner, against float64."""

import pytest
import torch
import torch.distributed as dist
from marks import promise
from pairwise import base_choice
from torch import nn

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.training import (
    AmpOptions,
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    ShardingOptions,
    Strategy,
    train_step,
)

MANY, WIDTH = 256, 4


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * self.weight


class Two(nn.Module):
    """Two products with the input: each weight's gradient is the mean of the rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Scale(), Scale()

    def forward(self, x):
        y = self.first(x)
        return (y + self.second(x)).float().sum(-1).mean()


def rows():
    """Return a batch of exact bf16 numbers; adding 1/1024 at a time stops at 1/4 in bf16."""
    return 1 + torch.randint(-8, 9, (2 * MANY, WIDTH), generator=torch.Generator().manual_seed(0)) / 64


def gradients(_group, options, more, dtype):
    """Train a step of SGD with learning rate 1 from zero; return how far this rank's gradients are from float64's."""
    model, batch = Two(), rows()
    if dtype is None:
        model, batch = model.bfloat16(), batch.bfloat16()
    strategy = Strategy(
        mesh={"dp": dist.get_world_size() // options.get("pipeline", PipelineOptions()).degree}, **options
    )
    merge = strategy.gradient_merge.steps
    batches = [(part,) for part in batch.chunk(merge)]
    if strategy.mode == "hybrid":
        batches = [(part.chunk(2)[dist.get_rank()],) for (part,) in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = train_step(model, batches[0], optimizer, strategy, **more)
    for part in batches:
        step(*part)
    truth, worst = -rows().double().mean(0), 0.0
    if strategy.max_norm is not None:
        truth *= strategy.max_norm / torch.cat([truth, truth]).norm()
    masters = {name: shard for name, shard in step.optimizer.tensor_shards().items() if name.endswith(".master")}
    for shard in (masters or step.tensor_shards()).values():
        (at,), size = shard.offsets, shard.local.numel()
        worst = max([worst, *(shard.local.double() / truth[at : at + size] - 1).abs().tolist()])
    step.close()
    return worst


AMP = {"bfloat16": AmpOptions(dtype="bfloat16"), "float16": AmpOptions(dtype="float16")}
MICRO = {"mode": "data", "pipeline": PipelineOptions(micro_batches=MANY)}
MERGE = {"mode": "data", "gradient_merge": GradientMerge(steps=MANY)}


def staged(schedule, virtual=1, zero_stage=0):
    return {
        "mode": "data",
        "pipeline": PipelineOptions(degree=2, micro_batches=MANY, schedule=schedule, virtual_stages=virtual),
        "overlap": OverlapOptions(operators=False),
        "sharding": ShardingOptions(zero_stage=zero_stage),
    }


@promise("accumulation-16-bit")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("zero_stage", "master_weights"), base_choice([0, 1, 2, 3], [True, False], (2, True)))
def test_micro_batches_at_every_level(ranks, zero_stage, master_weights):
    options = {
        **MICRO,
        "sharding": ShardingOptions(zero_stage=zero_stage),
        "amp": AmpOptions(dtype="bfloat16", master_weights=master_weights),
    }
    assert max(ranks(2).run(gradients, options, {}, "bfloat16")) < (1e-6 if master_weights else 2**-8)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_micro_batches_of_one_rank(ranks, zero_stage):
    options = {**MICRO, "amp": AMP["bfloat16"], "sharding": ShardingOptions(zero_stage=zero_stage)}
    assert max(ranks(1).run(gradients, options, {}, "bfloat16")) < 1e-6


@promise("accumulation-16-bit")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "more"),
    [
        (MICRO, {}),
        (MERGE, {}),
        ({**MICRO, "max_norm": 0.5}, {}),
        ({**MICRO, "max_norm": 0.5, "sharding": ShardingOptions(zero_stage=1)}, {}),
        ({**MICRO, "overlap": OverlapOptions(gradients=False)}, {}),
        ({**MICRO, "sharding": ShardingOptions(zero_stage=1)}, {"static": False}),
        ({**MERGE, "mode": "hybrid", "sharding": ShardingOptions(zero_stage=1)}, {}),
        ({**MERGE, "mode": "hybrid", "sharding": ShardingOptions(zero_stage=2)}, {}),
    ],
)
def test_every_way_to_accumulate_in_a_model_of_16_bits_itself(ranks, options, more):
    assert max(ranks(2).run(gradients, options, more, None)) < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [staged("1f1b"), staged("gpipe", zero_stage=2), staged("zero_bubble", 2), staged("zbv", 2)]
)
def test_micro_batches_of_a_pipeline(ranks, options):
    assert max(ranks(4).run(gradients, {**options, "amp": AMP["bfloat16"]}, {}, "bfloat16")) < 1e-6


def test_micro_batches_in_float16(ranks):
    assert max(ranks(2).run(gradients, {**MICRO, "amp": AMP["float16"]}, {}, "float16")) < 1e-6


def gradient_dtypes(_group, master_grad):
    """Return the dtypes of the gradients of one backward, and of several."""
    found = []
    for count in (1, 4):
        amp, pipeline = AmpOptions(dtype="bfloat16", master_grad=master_grad), PipelineOptions(micro_batches=count)
        model, strategy = Two(), Strategy(mode="data", mesh={"dp": 2}, amp=amp, pipeline=pipeline)
        step = train_step(model, (rows(),), torch.optim.SGD(model.parameters(), lr=1.0), strategy)
        step(rows())
        found.append({grad_dtype(parameter) for parameter in step.modules[0].parameters()})
        step.close()
    return found


@pytest.mark.parametrize("master_grad", [None, True, False])
def test_master_grad_decides_the_dtype_of_gradients(ranks, master_grad):
    narrow, wide = {torch.bfloat16}, {torch.float32}
    expected = {None: [narrow, wide], True: [wide, wide], False: [narrow, narrow]}[master_grad]
    assert ranks(2).run(gradient_dtypes, master_grad) == [expected, expected]


def test_without_master_grad_small_terms_are_lost(ranks):
    amp = AmpOptions(dtype="bfloat16", master_grad=False)
    assert min(ranks(2).run(gradients, {**MICRO, "amp": amp}, {}, "bfloat16")) > 1e-3
