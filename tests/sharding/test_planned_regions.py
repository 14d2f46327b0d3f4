"""Regions of a planned graph: against the unsharded model in float64, and against the same plan without regions.

Collectives are late here: unfinished rows are NaN.
"""

import contextlib
from unittest import mock

import pytest
import small_models
import torch
from delayed_collectives import DelayedWork, delayed_collectives
from marks import promise
from pairwise import pairwise
from pool import on_ranks
from sharded_models import column_and_row, compare, made, mesh_of, planned, step, tokens_of
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import ascend_parallel
from ascend_parallel import Settings
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

REGION = {"num_chunks": 4, "region": True, "region_rows": 4}


class FloatNorm(nn.Module):
    """An RMS norm in another dtype than its input, as those of published models."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.double()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Norm(nn.Module):
    """Two blocks; `between` is what stands between their branches."""

    def __init__(self, norm=nn.LayerNorm, between=None, width=24, wide=48):
        super().__init__()
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.between = between or nn.Identity()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, wide), "down": nn.Linear(wide, width)}) for _ in range(2)
        )

    def forward(self, x):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = self.between(x + block["down"](F.gelu(block["up"](norm(x)))))
        return x


def scattered(row_dim):
    """Return strategies of `Norm` with its rows scattered along `row_dim`."""
    rows = (tuple("mp" if dim == row_dim else None for dim in range(3)),)
    return {
        "blocks.*.up": (((None, None, None), ("mp", None)), None),
        "blocks.*.down": (((None, None, "mp"), (None, "mp")), None),
        ":add": (None, rows),
        "norms.*": (None, rows),
    }


def traced(model, x):
    return trace(model, (x.clone().requires_grad_(),))


def regions():
    return ascend_parallel.ops.COUNTS.as_dict().get("region", {"calls": 0})["calls"]


def sharded_norm(group, model, x, strategies=None, **settings):
    plan = propagate(
        traced(model, x), mesh_of((group.size(),)), strategies or column_and_row(), objective="redistribution"
    )
    return ShardedModule(model, plan, settings=Settings(**{**REGION, **settings}))


def run_norm(group, shape, norm, strategies, around=contextlib.nullcontext):
    model, x = made(Norm, norm), torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = sharded_norm(group, model, x, strategies)
    ascend_parallel.ops.COUNTS.clear()
    with delayed_collectives():
        with around():
            compare(model, sharded, x)
        with torch.no_grad():
            torch.testing.assert_close(sharded(x), model(x), rtol=1e-10, atol=1e-12)
    return regions(), DelayedWork.unfinished


@promise("region-truth")
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("norm", "shape", "count"),
    pairwise(
        [nn.LayerNorm, small_models.RMSNorm, nn.RMSNorm, FloatNorm],
        [(64, 3, 24), (1, 96, 24), (3, 32, 24)],
        [2, 3, 4],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_region_matches_the_unsharded_truth(ranks, count, shape, norm):
    """Both row layers leave their rows, in training and in evaluation."""
    assert ranks(count).run(run_norm, shape, norm, None) == [(4, 0)] * count


@pytest.mark.sample(2)
@pytest.mark.parametrize("row_dim", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_scattered_rows_match_the_unsharded_truth(ranks, count, row_dim):
    shape = (4, 96, 24) if row_dim else (96, 4, 24)
    assert ranks(count).run(run_norm, shape, nn.LayerNorm, scattered(row_dim)) == [(4, 0)] * count


def copying():
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def test_copies_of_saved_tensors_are_finished(ranks):
    assert ranks(2).run(run_norm, (64, 3, 24), nn.LayerNorm, None, copying) == [(4, 0)] * 2


@on_ranks(2)
def test_checkpoints(group):
    model, x = made(Norm), torch.randn((64, 3, 24), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = sharded_norm(group, model, x)
    forward = sharded.forward
    sharded.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    with delayed_collectives():
        compare(model, sharded, x)


@pytest.mark.parametrize(
    "norm, strategies",
    [
        *((norm, None) for norm in (nn.LayerNorm, small_models.RMSNorm, nn.RMSNorm, FloatNorm)),
        *((nn.LayerNorm, scattered(dim)) for dim in (0, 1)),
    ],
)
@on_ranks(2)
def test_a_region_keeps_the_bits_on_two_ranks(group, norm, strategies):
    model = made(Norm, norm, width=64, wide=256).float()
    x = torch.randn(512, 2, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for region in (False, True):
        sharded = sharded_norm(group, model, x, strategies, region=region, region_rows=64)
        ascend_parallel.ops.COUNTS.clear()
        y, inputs = step(sharded, x)
        assert regions() == 2 * region
        found.append([y, *inputs, *(parameter.grad.clone() for parameter in sharded.parameters())])
        sharded.zero_grad()
    equal = [torch.equal(plain, mine) for plain, mine in zip(*found, strict=True)]
    assert all(equal) and len(equal) >= 12, equal


def run_model(group, name, batch, mesh_shape, options):
    sizes = {"width": 48, "heads": 12} | ({"groups": 12} if name == "Llama" else {}) if options else {}
    model = made(getattr(small_models, name), **sizes).eval()
    tokens = tokens_of(batch, torch.Generator().manual_seed(2))
    plan = planned(name, trace(model, (tokens, tokens)), mesh_of(mesh_shape), **options)
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    ascend_parallel.ops.COUNTS.clear()
    with delayed_collectives():
        compare(model, sharded, tokens, tokens)
    return regions(), DelayedWork.unfinished


@pytest.mark.sample("Llama-dp and mp")
@pytest.mark.parametrize(
    "count, mesh_shape, options",
    [
        (2, (2,), {}),
        (2, (2,), {"rows_cut": True, "row_dim": 1}),
        (4, (2, 2), {"data_dim": "dp"}),
        (4, (2, 2), {"data_dim": "dp", "rows_cut": True, "row_dim": 1}),
        (4, (2, 2), {}),  # the residual stream is whole along dp: a gather follows each row matmul
    ],
    ids=["mp", "sequence", "dp and mp", "dp, mp and sequence", "dp and mp, whole stream"],
)
@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_decoders_match_the_unsharded_truth(ranks, name, count, mesh_shape, options):
    for calls, left in ranks(count).run(run_model, name, 12, mesh_shape, options):
        assert calls >= 2
        assert left == 0


BETWEEN = {
    "another order of rows": lambda x: x.flip(0),
    "along rows": lambda x: x * x.softmax(0),
    "a view": lambda x: x.reshape(3, 64, 24).sin().view(x.shape),
}


class Between(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return BETWEEN[self.name](x)


@pytest.mark.parametrize("name", BETWEEN)
@on_ranks(2)
def test_operators_that_do_not_work_by_rows_get_finished_rows(group, name):
    model = made(Norm, between=Between(name))
    x = torch.randn(64, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = sharded_norm(group, model, x)
    with delayed_collectives():
        compare(model, sharded, x)


@on_ranks(2)
def test_few_rows_and_autocast(group):
    model, x = made(Norm), torch.randn(64, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = sharded_norm(group, model, x, region_rows=1000)
    ascend_parallel.ops.COUNTS.clear()
    with delayed_collectives():
        compare(model, sharded, x)
    few = regions()
    model, x = made(Norm).float(), x.float()
    sharded = sharded_norm(group, model, x)
    with delayed_collectives(), torch.autocast("cpu", torch.bfloat16):
        y = sharded(x.requires_grad_())
    assert few == 0
    assert y.isfinite().all()
    assert regions() == 2


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategies", [None, scattered(0)], ids=["all-reduce", "reduce-scatter"])
@on_ranks(2)
def test_habits_of_one_rank_change_no_collective(group, strategies):
    """Rank 1 alone runs under a mode, with another F.linear."""

    @contextlib.contextmanager
    def around():
        own = F.linear
        with Watching(), mock.patch.object(F, "linear", lambda *args, **kwargs: own(*args, **kwargs)):
            yield

    run_norm(group, (32, 2, 24), nn.LayerNorm, strategies, around if group.rank() == 1 else contextlib.nullcontext)
