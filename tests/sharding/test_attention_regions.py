"""Regions of planned transformers, which pass the attention where the batch is the first dimension."""

from collections import Counter
from unittest import mock

import pytest
import torch
from late import LateWork, late_collectives
from sharded import compare, made, mesh_of, planned, step
from test_row_regions import REGION, instructions, planned_model, run_model
from torch import nn
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.overlap.region.deferred import Deferred
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.row_regions import RunRegion
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


# The first region passes the second block's attention, with its views, and Llama's rotary embedding; with four ranks
# Llama's two key heads are gathered before.
@pytest.mark.parametrize(
    "count, name, lengths", [(2, "GPT", [16, 9]), (4, "GPT", [16, 9]), (2, "Llama", [46, 20]), (4, "Llama", [23, 20])]
)
def test_transformer_blocks(ranks, count, name, lengths):
    for found, seen in ranks(count).run(run_model, name, 8, (count,), {}):
        assert found == lengths, (found, seen)


@pytest.mark.parametrize("name, lengths", [("GPT", [16, 9]), ("Llama", [46, 20])])
def test_data_parallel_transformer_blocks(ranks, name, lengths):
    for found, seen in ranks(4).run(run_model, name, 8, (2, 2), {"data_dim": "dp"}):
        assert found == lengths, (found, seen)


def filled_operators():
    """Return a patch that counts the chunks of every operator; and the counts."""
    found, fill = Counter(), Deferred._fill

    def counted(self, function, *rest):
        found[function.name()] += 1
        return fill(self, function, *rest)

    return mock.patch.object(Deferred, "_fill", counted), found


def bits(group, name):
    model, tokens, plan = planned_model(name, 8, (group.size(),))
    model, found = model.float(), []
    plan = planned(name, trace(model, (tokens, tokens)), mesh_of((group.size(),)))
    patch, operators = filled_operators()
    for region in (False, True):
        sharded = ShardedModule(model, plan, settings=Settings(**{**REGION, "region": region}))
        with patch:
            y, _ = step(sharded, tokens, tokens)
        found.append([y, *(parameter.grad for parameter in sharded.parameters())])
    return all(torch.equal(plain, mine) for plain, mine in zip(*found, strict=True)), operators[ATTENTION]


@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_the_bits_stay_and_the_second_attention_runs_in_chunks(ranks, name):
    assert ranks(2).run(bits, name) == [(True, 4)] * 2


class Attention(nn.Module):
    """Blocks of attention whose mask has a batch of its own, or one for all."""

    def __init__(self, masks, causal=False, width=32):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        mask = None if masks is None else torch.linspace(-1, 1, masks * 256).reshape(masks, 1, 16, 16)
        self.register_buffer("mask", mask)
        self.causal = causal

    def forward(self, x):
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).unflatten(2, (4, 3, -1)).transpose(1, 2).unbind(3)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal)
            x = x + out(a.transpose(1, 2).flatten(2))
        return x


def attended(group, shape, masks, causal):
    model = made(Attention, masks, causal)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = {f"qkv.{block}": (((None, None, None), ("mp", None)), None) for block in range(2)}
    chosen |= {f"out.{block}": (((None, None, "mp"), (None, "mp")), None) for block in range(2)}
    plan = propagate(
        trace(model, (x.clone().requires_grad_(),)), mesh_of((group.size(),)), chosen, objective="redistribution"
    )
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    patch, operators = filled_operators()
    with late_collectives(), patch:
        compare(model, sharded, x)
    assert LateWork.unfinished == 0
    return [region.end for region in instructions(sharded, RunRegion)], operators[ATTENTION]


@pytest.mark.parametrize("masks, causal", [(None, True), (None, False), (1, False), (6, False)])
@pytest.mark.parametrize("count", [2, 4])
def test_attention_with_and_without_masks(ranks, count, masks, causal):
    """Six sequences in four chunks: the chunks are unlike."""
    for ends, chunks in ranks(count).run(attended, (6, 16, 32), masks, causal):
        assert chunks >= 3 and len(ends) == 1
