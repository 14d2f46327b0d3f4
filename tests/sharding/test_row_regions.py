"""Regions of a planned graph: against the unsharded model in float64, and against the same plan without regions.

Collectives are late here: unfinished rows are NaN.
"""

from unittest import mock

import pytest
import small_models
import torch
from late import LateWork, late_collectives
from sharded import CHUNKS, FORMS, MLP, column_and_row, compare, made, mesh_of, planned, step, tokens_of
from torch import nn
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.overlap.region.deferred import Deferred
from ascend_parallel.overlap.region.exchange import Reduced
from ascend_parallel.overlap.region.rows import LazyRows
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.compute_instructions import RunKernel
from ascend_parallel.sharding.runtime.row_regions import RunRegion
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.instructions import instructions_as_text, list_instructions

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
    """`between` is what stands between the two norms' branches, to end a region."""

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


def traced(model, x):
    return trace(model, (x.clone().requires_grad_(),))


def instructions(sharded, kind, gradients=True):
    return [each for each in sharded.instructions(gradients=gradients).instructions if isinstance(each, kind)]


def chunks_seen():
    """Return a patch that notes, in order, the starts of a region's all-reduces; and the list."""
    seen, send = [], Reduced.send

    def noted(self, index, y_r):
        seen.append((index, LateWork.unfinished))
        return send(self, index, y_r)

    return mock.patch.object(Reduced, "send", noted), seen


def planned_model(name, batch, mesh_shape, **options):
    model = made(getattr(small_models, name)).eval()
    tokens = tokens_of(batch, torch.Generator().manual_seed(2))
    return model, tokens, planned(name, trace(model, (tokens, tokens)), mesh_of(mesh_shape), **options)


def run_model(group, name, batch, mesh_shape, options):
    model, tokens, plan = planned_model(name, batch, mesh_shape, **options)
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    patch, seen = chunks_seen()
    with late_collectives(), patch:
        compare(model, sharded, tokens, tokens)
    assert LateWork.unfinished == 0
    return [len(region.nodes) for region in instructions(sharded, RunRegion)], seen


def test_a_stream_that_is_whole_along_dp_ends_a_region():
    """Without `data_dim` the planner keeps the small residual stream whole: a gather follows each row matmul."""
    _, _, plan = planned_model("GPT", 8, (2, 2))
    listed = instructions_as_text(list_instructions(plan, settings=Settings(**REGION)))
    reason = "no region: no matmul reads its rows before its rows change their layout: all_gather(dim 0, dp)"
    assert listed.count(reason) == 4 and "run region" not in listed


def run_norm(group, shape, norm, dtype):
    model = made(Norm, norm).to(dtype)
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    plan = propagate(traced(model, x), mesh_of((group.size(),)), column_and_row(), objective="redistribution")
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    patch, seen = chunks_seen()
    with late_collectives(), patch:
        compare(model, sharded, x)
        with torch.no_grad():
            torch.testing.assert_close(sharded(x), model(x), rtol=1e-10, atol=1e-12)
    assert LateWork.unfinished == 0
    return len(instructions(sharded, RunRegion)), seen


@pytest.mark.parametrize("norm", [nn.LayerNorm, small_models.RMSNorm, nn.RMSNorm, FloatNorm])
@pytest.mark.parametrize("shape", [(64, 3, 24), (1, 96, 24), (3, 32, 24)], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_region_matches_the_unsharded_truth(ranks, count, shape, norm):
    for found, seen in ranks(count).run(run_norm, shape, norm, torch.float64):
        assert found == 1
        # the first layer starts all its chunks; the second starts chunk i when the first's chunk i has arrived
        first = [index for index, _ in seen]
        chunks = max(first) + 1
        assert chunks >= 3, seen
        assert first[: 2 * chunks] == [*range(chunks), *range(chunks)]
        waiting = [unfinished for _, unfinished in seen[chunks : 2 * chunks]]
        assert waiting == [chunks - 1] * chunks, seen


def compare_bits(group, norm):
    model = made(Norm, norm, width=64, wide=256).float()
    x = torch.randn(512, 2, 64, generator=torch.Generator().manual_seed(1))
    plan = propagate(traced(model, x), mesh_of((group.size(),)), column_and_row(), objective="redistribution")
    found = []
    for region in (False, True):
        settings = Settings(num_chunks=4, region=region, region_rows=64)
        sharded = ShardedModule(model, plan, settings=settings)
        assert len(instructions(sharded, RunRegion)) == region
        patch, seen = chunks_seen()
        with patch:
            y, inputs = step(sharded, x)
        assert bool(seen) == region
        found.append([y, *inputs, *(parameter.grad for parameter in sharded.parameters())])
    return [torch.equal(plain, mine) for plain, mine in zip(*found, strict=True)]


@pytest.mark.parametrize("norm", [nn.LayerNorm, small_models.RMSNorm, nn.RMSNorm, FloatNorm])
def test_a_region_keeps_the_bits_on_two_ranks(ranks, norm):
    for equal in ranks(2).run(compare_bits, norm):
        assert all(equal) and len(equal) >= 12, equal


def along_both(group):
    """Run a model whose first block is parallel along dp and whose second is along mp."""
    model, x = made(Norm), torch.randn((64, 3, 24), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chosen = {}
    for block, dim in enumerate(("dp", "mp")):
        chosen[f"blocks.{block}.up"] = (((None, None, None), (dim, None)), None)
        chosen[f"blocks.{block}.down"] = (((None, None, dim), (None, dim)), None)
    plan = propagate(traced(model, x), mesh_of((2, 2)), chosen, objective="redistribution")
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    with late_collectives():
        compare(model, sharded, x)
    return [region.end for region in instructions(sharded, RunRegion)]


def test_a_matmul_along_another_mesh_dimension_ends_a_region(ranks):
    for (end,) in ranks(4).run(along_both):
        assert end.endswith("it communicates along another mesh dimension"), end


class Fault(Exception):
    """A planted fault."""


def faulty(group):
    """Return whether an operator that does not ask for its rows gives NaN, and what an exception leaves behind."""
    model = made(Norm)
    x = torch.randn(64, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = propagate(traced(model, x), mesh_of((group.size(),)), column_and_row(), objective="redistribution")
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    with late_collectives(), mock.patch.object(Deferred, "rows", return_value=None):
        read = sharded(x).isnan().any().item()
    send = Reduced.send

    def failing(self, index, y_r):
        if index == 2:
            raise Fault
        return send(self, index, y_r)

    with late_collectives(), mock.patch.object(Reduced, "send", failing), pytest.raises(Fault):
        sharded(x)
    left = LateWork.unfinished
    with late_collectives():
        compare(model, sharded, x)
    return read, left


def test_faults(ranks):
    assert ranks(2).run(faulty) == [(True, 0)] * 2


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_change_in_place_waits_for_its_rows(read_before, blocks):
    """An operator such as rms_norm changes its own intermediate result; who has read it before gets the old rows."""
    source, asked = torch.arange(blocks * 32.0).reshape(blocks * 8, 4), []
    x = torch.full_like(source, torch.nan)

    def fill(index):
        asked.append(index)
        for block in range(blocks):
            rows = slice(block * 8 + 4 * index, block * 8 + 4 * index + 4)
            x.data[rows] = source[rows]

    with Deferred((4, 4), 0, 8, None) as deferred:
        deferred.track([x], LazyRows((4, 4), fill), blocks)
        with deferred.operators():
            before = x * 2 if read_before else None
            y = x.add_(1)
            after = y.mean(-1, keepdim=True).rsqrt()
        assert asked == ([0, 1] if read_before else [])  # rows with another reader are finished before the change
    assert torch.equal(y, source + 1) and y is x
    assert torch.equal(after, (source + 1).mean(-1, keepdim=True).rsqrt())
    assert before is None or torch.equal(before, source * 2)


class Turned(nn.Module):
    def forward(self, x):
        return x.flip(0)


class Along(nn.Module):
    def forward(self, x):
        return x * x.softmax(0)


class Viewed(nn.Module):
    def forward(self, x):
        return x.reshape(3, 64, 24).sin().view(x.shape)


ENDS = {
    "dropout": (nn.Dropout(0.5), "dropout: it draws random numbers"),
    "another order of rows": (Turned(), "flip: it is not known to work row by row"),
    "along rows": (Along(), "softmax: it is not known to work row by row"),
    "a view": (Viewed(), "reshape: it is not known to work row by row"),
}


@pytest.mark.parametrize("between, end", ENDS.values(), ids=ENDS)
def test_what_ends_a_region(between, end):
    model, x = made(Norm, between=between), torch.randn(64, 3, 24, dtype=torch.float64)
    plan = propagate(traced(model, x), mesh_of((2,)), column_and_row(), objective="redistribution")
    listed = instructions_as_text(list_instructions(plan, settings=Settings(**REGION)))
    assert f"no region: no matmul reads its rows before {end}" in listed
    assert "run region" not in listed


def test_the_list_of_instructions_shows_regions():
    model, x = made(Norm), torch.randn(64, 3, 24, dtype=torch.float64)
    plan = propagate(traced(model, x), mesh_of((2,)), column_and_row(), objective="redistribution")
    listed = instructions_as_text(list_instructions(plan, settings=Settings(**REGION)))
    names = "blocks.0.down linear, add, norms.1 layer_norm, blocks.1.up linear, gelu, blocks.1.down linear, add"
    assert f"{names}; ends before the end" in listed
    for region in (False, "auto"):
        listed = instructions_as_text(list_instructions(plan, settings=Settings(**{**REGION, "region": region})))
        assert "region" not in listed


def reasons(group):
    """Return why reduce-scatters and single rows begin no region, and what runs in one chunk."""
    found = []
    for form, shape in (("sequence", (48, 2, 12)), ("tensor", (1, 1, 12))):
        model, x = made(MLP), torch.randn(shape, dtype=torch.float64)
        plan = FORMS[form](traced(model, x), mesh_of((group.size(),)))
        sharded = ShardedModule(model, plan, settings=Settings(**CHUNKS, region=True))
        compare(model, sharded, x)
        found += [each.alone for each in instructions(sharded, RunKernel) if each.alone]
    model, x = made(Norm), torch.randn(64, 3, 24, dtype=torch.float64)
    plan = propagate(traced(model, x), mesh_of((group.size(),)), column_and_row(), objective="redistribution")
    for options in ({"region_rows": 1000}, {"deterministic": True}):
        sharded = ShardedModule(model, plan, settings=Settings(**{**REGION, **options}))
        patch, seen = chunks_seen()
        model.zero_grad()
        with late_collectives(), patch:
            compare(model, sharded, x)
        found.append(len(seen))
    model, x = made(Norm).float(), x.float()
    plan = propagate(traced(model, x), mesh_of((group.size(),)), column_and_row(), objective="redistribution")
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    with late_collectives(), patch, torch.autocast("cpu", torch.bfloat16):
        y = sharded(x.requires_grad_())
    return [*found, len(seen), y.isfinite().all().item()]


def test_reasons(ranks):
    end = "no matmul reads its rows before its rows change their layout: all_gather(dim 0, mp) 4.61 KB 0.015 ms"
    expected = [end, "it has a single row", 0, 0, 0, True]
    assert ranks(2).run(reasons) == [expected] * 2
