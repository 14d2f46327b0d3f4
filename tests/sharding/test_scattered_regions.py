"""Regions of planned graphs that begin at reduce-scatters: against float64, and against the plan without regions.

Collectives are late here: unfinished rows are NaN.
"""

from unittest import mock

import pytest
import small_models
import torch
from late import LateWork, late_collectives
from sharded import compare, made, mesh_of, planned, step, tokens_of
from test_row_regions import REGION, Fault, Norm, chunks_seen, instructions, traced
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.overlap.region.deferred import Deferred
from ascend_parallel.overlap.region.exchange import GatheredRows, Reduced
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.row_regions import RunRegion
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

SIZES = {"GPT": {"width": 48, "heads": 12}, "Llama": {"width": 48, "heads": 12, "groups": 12}}


def run_model(group, name, row_dim, length, batch, options, data=1):
    model = made(getattr(small_models, name), length=length, **SIZES[name]).eval()
    tokens = tokens_of(batch, torch.Generator().manual_seed(2), length)
    graph = trace(model, (tokens, tokens))
    mesh = mesh_of((data, group.size() // data) if data > 1 else (group.size(),))
    data_dim = "dp" if data > 1 else None
    plan = planned(name, graph, mesh, rows_cut=True, data_dim=data_dim, row_dim=row_dim)
    sharded = ShardedModule(model, plan, settings=Settings(**REGION, **options))
    patch, seen = chunks_seen()
    with late_collectives(), patch:
        compare(model, sharded, tokens, tokens)
        model.zero_grad()
        sharded.zero_grad()
        compare(model, sharded, tokens, tokens)
        with torch.no_grad():
            torch.testing.assert_close(sharded(tokens, tokens), model(tokens, tokens), rtol=1e-10, atol=1e-12)
    assert LateWork.unfinished == 0
    return [len(region.nodes) for region in instructions(sharded, RunRegion)], [index for index, _ in seen]


def interleaved(seen):
    """Tell whether the second layer sends its first chunk before the first layer has sent its last.

    The first layer sends a chunk ahead of the gather, and the gather a chunk ahead of the second layer.
    """
    return seen.index(0, 1) < seen.index(max(seen))


@pytest.mark.sample(8)
@pytest.mark.parametrize("row_dim, length, batch", [(1, 24, 16), (0, 8, 48), (1, 288, 1)])
@pytest.mark.parametrize("name, lengths", [("GPT", [10, 8]), ("Llama", [23, 19])])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_transformer_blocks(ranks, count, name, lengths, row_dim, length, batch):
    for found, seen in ranks(count).run(run_model, name, row_dim, length, batch, {}):
        assert found == lengths, (found, seen)
        assert max(seen) == 3 and interleaved(seen), seen


@pytest.mark.parametrize("name, lengths", [("GPT", [10, 8]), ("Llama", [23, 19])])
def test_data_parallel_transformer_blocks(ranks, name, lengths):
    for found, seen in ranks(4).run(run_model, name, 1, 24, 16, {}, 2):
        assert found == lengths, (found, seen)
        assert max(seen) == 3 and interleaved(seen), seen


def test_rows_gathered_again_in_backward(ranks):
    for found, seen in ranks(2).run(run_model, "GPT", 1, 24, 16, {"recompute_all_gather": True}):
        assert found == [10, 8] and interleaved(seen), (found, seen)


def scattered(row_dim):
    """Return strategies of `Norm` with its rows scattered along `row_dim`."""
    rows = (tuple("mp" if dim == row_dim else None for dim in range(3)),)
    return {
        "blocks.*.up": (((None, None, None), ("mp", None)), None),
        "blocks.*.down": (((None, None, "mp"), (None, "mp")), None),
        ":add": (None, rows),
        "norms.*": (None, rows),
    }


def sharded_norm(group, row_dim, settings, dtype=torch.float32, shape=(256, 4, 64), width=64):
    model = made(Norm, nn.LayerNorm, width=width, wide=4 * width).to(dtype)
    if row_dim:
        shape = (shape[1], shape[0], shape[2])
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    plan = propagate(traced(model, x), mesh_of((group.size(),)), scattered(row_dim), objective="redistribution")
    return model, x, ShardedModule(model, plan, settings=settings)


def compare_bits(group, row_dim):
    found = []
    for region in (False, True):
        settings = Settings(num_chunks=4, region=region, region_rows=64)
        _, x, sharded = sharded_norm(group, row_dim, settings)
        assert len(instructions(sharded, RunRegion)) == region
        patch, seen = chunks_seen()
        with patch:
            y, inputs = step(sharded, x)
        assert bool(seen) == region
        found.append([y, *inputs, *(parameter.grad for parameter in sharded.parameters())])
    return [torch.equal(plain, mine) for plain, mine in zip(*found, strict=True)]


@pytest.mark.parametrize("row_dim", [0, 1])
def test_a_region_keeps_the_bits_on_two_ranks(ranks, row_dim):
    for equal in ranks(2).run(compare_bits, row_dim):
        assert all(equal) and len(equal) >= 12, equal


def faulty(group, kind):
    """Return whether an operator that does not ask for its rows gives NaN, and what an exception leaves behind."""
    model, x, sharded = sharded_norm(group, 1, Settings(**REGION), torch.float64, (48, 4, 24), 24)
    with late_collectives(), mock.patch.object(Deferred, "rows", return_value=None):
        read = sharded(x).isnan().any().item()
    plain = kind.multiply

    def failing(self, index, *args):
        if index == 2:
            raise Fault
        return plain(self, index, *args)

    with late_collectives(), mock.patch.object(kind, "multiply", failing), pytest.raises(Fault):
        sharded(x)
    left = LateWork.unfinished
    with late_collectives():
        compare(model, sharded, x)
    return read, left


@pytest.mark.parametrize("kind", [Reduced, GatheredRows])
def test_faults(ranks, kind):
    assert ranks(2).run(faulty, kind) == [(True, 0)] * 2
