"""Mixed precision with ZeRO, pipelines, stages on meshes of different shapes, recompute and clipping, all at once.

A Llama of transformers trains for three steps; its updates are those of one card in float32, up to rounding.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import transformers
from pool import on_ranks
from torch.nn import functional as F

from ascend_parallel.training import (
    AmpOptions,
    GradientMerge,
    PipelineOptions,
    Recompute,
    ShardingOptions,
    Strategy,
    train_step,
)

AMP = {
    "O1": AmpOptions(dtype="bfloat16", level="O1"),
    "O2": AmpOptions(dtype="bfloat16"),
    "O2, fp32 gradients": AmpOptions(dtype="bfloat16", master_grad=True),
    "fp16": AmpOptions(dtype="float16"),
}
MIXED = ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 2})
LAYOUTS = {
    "auto": {"mesh": {"dp": 2, "tp": 2}},
    "pipeline": {"mode": "data", "mesh": {"dp": 2}, "pipeline": PipelineOptions(degree=2, micro_batches=4)},
    "meshes": {"pipeline": PipelineOptions(degree=2, micro_batches=2, schedule="gpipe", meshes=MIXED)},
}
STEPS, MERGED = 3, 2


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    options = {"num_key_value_heads": 2, "vocab_size": 96, "use_cache": False, "initializer_range": 0.15}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options, tie_word_embeddings=True))


def loss_of(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch_of(number):
    return torch.randint(0, 96, (16, 12), generator=torch.Generator().manual_seed(number))


@functools.cache
def on_one_card():
    """Return the parameters before and after, and the losses; once in a process."""
    model = llama()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for number in range(STEPS * MERGED):
        loss = loss_of(model, batch_of(number))
        (loss / MERGED).backward()
        losses.append(loss.item())
        if number % MERGED:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return before, dict(model.named_parameters()), losses


def strategy_of(layout, amp, zero_stage):
    return Strategy(
        **LAYOUTS[layout],
        amp=AMP[amp],
        sharding=ShardingOptions(zero_stage=zero_stage),
        recompute=Recompute(modules=("model.layers.0", "model.layers.2")),
        gradient_merge=GradientMerge(steps=MERGED),
        max_norm=0.3,
    )


# Meshes of different shapes at each precision and each stage of ZeRO. What one mesh does with casts, masters and sums
# in 16 bits, test_autocast.py and test_gradient_accumulation.py have exactly; here it comes with merging and clipping.
CASES = [(amp, "meshes", zero_stage) for zero_stage, amp in enumerate(AMP)]
CASES += [("O2, fp32 gradients", "auto", 3), ("fp16", "pipeline", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("amp", "layout", "zero_stage"), CASES)
@on_ranks(4)
def test_updates_are_those_of_one_card(group, layout, amp, zero_stage):
    torch.manual_seed(group.rank())
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = train_step(model, (batch_of(0),), optimizer, strategy_of(layout, amp, zero_stage), loss=loss_of)
    losses = [step(batch_of(number)).item() for number in range(STEPS * MERGED)]
    parts = [None] * group.size()
    mine = {name: (shard.local.detach().float(), shard.offsets) for name, shard in step.tensor_shards().items()}
    dist.all_gather_object(parts, mine)
    step.close()
    before, expected, truth = on_one_card()
    torch.testing.assert_close(losses, truth, rtol=0.03, atol=0)
    for name, parameter in expected.items():
        whole = torch.full_like(parameter, float("nan"))
        for local, offsets in (part[name] for part in parts if name in part):
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, local.shape, strict=True))] = local
        # a gradient that is too large or too small by the number of ranks is wrong by half the update or more
        allowed = 0.3 * (parameter - before[name]).norm() + 0.003 * parameter.norm()
        assert (whole - parameter).norm() < allowed, name
