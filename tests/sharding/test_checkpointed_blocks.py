"""Checkpointed blocks of a planned model: the same bits, no collective twice unless requested, less memory."""

from collections import Counter

import pytest
import small_models
import torch
from allocations import alive_bytes
from pool import on_ranks
from sharded_models import BATCHES, CHUNKS, FORMS, MLP, collectives_of, compare, made, mesh_of, planned
from torch import nn
from torch.nn import functional as F

from ascend_parallel import Settings
from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.sharding.planner.operator_strategy import StrategyError
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.activation_memory import saved_bytes
from ascend_parallel.sharding.runtime.randomness import manual_seed
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

LAYERS = {"modules": ["layers.*"]}
SINGLE = {"modules": ["layers.*:scaled_dot_product_attention", "layers.*:gelu"]}


def bits(model, batch):
    """Return the loss and gradients of a step, and the random number drawn after the step."""
    model.zero_grad()
    torch.manual_seed(3)
    if isinstance(model, ShardedModule):
        manual_seed(model, 3)
    loss = model(*batch)
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}, torch.rand(1)


def models(name, mesh_shape, options, *, rows_cut=False, overlap=True, settings=(), bucket_bytes=1 << 20, **made_of):
    """Return the whole model, a rank's part without and with recompute, and a batch."""
    whole = made(getattr(small_models, name), **made_of)
    batch = BATCHES[name](torch.Generator().manual_seed(7))
    plan = planned(name, trace(whole, batch), mesh_of(mesh_shape), rows_cut)
    of = {"overlap": overlap, "settings": Settings(**dict(settings)), "bucket_bytes": bucket_bytes}
    plain = ShardedModule(whole, plan, **of)
    recomputing = ShardedModule(whole, plan, **of, recompute=Recompute(**options))
    return whole, plain, recomputing, batch


def same(group, name, mesh_shape, options, variants, rows_cut=False, **made_of):
    """Compare two steps bit for bit, for each variant (overlap, settings, exceptions)."""
    whole = made(getattr(small_models, name), **made_of)
    batch = BATCHES[name](torch.Generator().manual_seed(7))
    plan = planned(name, trace(whole, batch), mesh_of(mesh_shape), rows_cut)
    for overlap, settings, keep in variants:
        of = {"overlap": overlap, "settings": Settings(**settings)}
        plain = ShardedModule(whole, plan, **of)
        recomputing = ShardedModule(whole, plan, **of, recompute=Recompute(**{**options, "keep": keep}))
        expected = bits(plain, batch)
        for _ in range(2):
            torch.testing.assert_close(bits(recomputing, batch), expected, rtol=0, atol=0)
        assert recomputing.rank_plan.checkpointed_blocks


GATHERED = {**CHUNKS, "recompute_all_gather": False}


@pytest.mark.sample(1)
@pytest.mark.parametrize("collectives", ["keep", "recompute"])
def test_the_same_bits(ranks, collectives):
    """Rows sharded or not, overlapped or not, gathered rows kept or not; with exceptions; with dropout."""
    options, output = {**LAYERS, "collectives": collectives}, ["layers.*.mlp.down"]
    variants = [(False, {}, []), (True, CHUNKS, output), (True, GATHERED, []), (True, {}, ["layers.*.attention.?"])]
    for rows_cut in (False, True):
        ranks(2).run(same, "Llama", (2,), options, variants, rows_cut)
    some = ["layers.*.down", "layers.*:gelu", "layers.*:scaled_dot_product_attention"]
    variants = [(False, {}, []), (True, CHUNKS, []), (False, {}, some), (True, {}, some)]
    ranks(2).run(same_with_dropout, options, variants)


def same_with_dropout(group, options, variants):
    same(group, "GPT", (2,), options, variants, dropout=0.3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [SINGLE, {"modules": [""]}, {"modules": ["layers.1"], "collectives": "recompute"}])
def test_single_operators_the_whole_model_and_one_layer(ranks, options):
    ranks(2).run(same_with_dropout, options, [(False, {}, []), (True, {}, [])])


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["keep", "recompute"])
def test_two_mesh_dimensions(ranks, collectives):
    ranks(4).run(same, "Llama", (2, 2), {**LAYERS, "collectives": collectives}, [(True, CHUNKS, [])])
    ranks(4).run(same, "ResNet", (2, 2), {"modules": [""], "collectives": collectives}, [(True, CHUNKS, [])])


def mlp(group, form, collectives, overlap):
    """The first rank alone adds the bias, so autograd saves fewer tensors there than on the other ranks."""
    model, x = made(MLP), torch.randn(24, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = FORMS[form](trace(model, (x,)), mesh_of((group.size(),)))
    recompute = Recompute(modules=[""], collectives=collectives)
    compare(model, ShardedModule(model, plan, overlap=overlap, recompute=recompute), x)


@pytest.mark.parametrize("collectives", ["keep", "recompute"])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_save_different_tensors(ranks, form, collectives):
    for overlap in (False, True):
        ranks(2).run(mlp, form, collectives, overlap)
    ranks(3).run(mlp, form, collectives, False)


def counted(group, options, keywords):
    """Count collectives without prefetch, so that each runs alone."""
    _, plain, recomputing, batch = models("Llama", (2,), options, **keywords, bucket_bytes=0)
    found = []
    for model in (plain, recomputing):
        model.collective_counts.clear()
        loss, forward = collectives_of(lambda model=model: model(*batch))
        _, backward = collectives_of(loss.backward)
        found.append((dict(forward), dict(backward), sum(model.collective_counts.values())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rows_cut", [False, True])
def test_no_collective_runs_twice_where_they_are_kept(ranks, rows_cut):
    for overlap, settings in ((False, {}), (True, CHUNKS), (True, GATHERED)):
        keywords = {"rows_cut": rows_cut, "overlap": overlap, "settings": settings}
        for plain, recomputing in ranks(2).run(counted, LAYERS, keywords):
            assert recomputing == plain
            assert sum(plain[0].values()) >= 4  # a sum, or a gather and a scatter, for each half of a layer


@pytest.mark.slow
def test_recomputed_collectives(ranks):
    """Each layer's forward sums twice. The second sum is of the layer's output, which backward does not need."""
    options = {**LAYERS, "collectives": "recompute"}
    for overlap in (False, True):
        for plain, recomputing in ranks(2).run(counted, options, {"overlap": overlap}):
            assert recomputing[0] == plain[0]
            assert Counter(recomputing[1]) - Counter(plain[1]) == {"c10d::allreduce_": 2}
    keep = {**options, "keep": ["layers.*.attention.o"]}
    for plain, recomputing in ranks(2).run(counted, keep, {}):
        assert recomputing == plain


def flights(group, options):
    """Several forwards before the first backward, backwards in another order, and a forward without gradients."""
    _, plain, recomputing, batch = models("GPT", (2,), options, dropout=0.3)
    found = []
    for model in (plain, recomputing):
        manual_seed(model, 3)
        batches = [tuple(tensor.roll(shift, 0) for tensor in batch) for shift in range(3)]
        losses = [model(*rolled) for rolled in batches]
        with torch.no_grad():
            without_gradient = model(*batch)
        with model.no_sync():
            for loss in (losses[1], losses[0], losses[2]):
                loss.backward()
        model.reduce_gradients()
        gradients = [param.grad for param in model.parameters()]
        found.append(([loss.detach() for loss in losses], without_gradient, gradients))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.slow
def test_several_forwards_in_flight(ranks):
    for collectives in ("keep", "recompute"):
        ranks(2).run(flights, {**LAYERS, "keep": ["layers.*.up"], "collectives": collectives})


@pytest.mark.slow
@on_ranks(2)
def test_backward_twice(group):
    _, plain, recomputing, batch = models("Llama", (2,), LAYERS)
    found = []
    for model in (plain, recomputing):
        loss = model(*batch)
        with model.no_sync():
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Normed(nn.Module):
    """Running statistics."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.norm(self.up(x)))).square().mean()


@pytest.mark.slow
@on_ranks(2)
def test_running_statistics_are_updated_once(group):
    model = made(Normed)
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = propagate(
        trace(model, (x,)), mesh_of((2,)), {"up": ([("mp", None), None], None)}, objective="redistribution"
    )
    found = []
    for recompute in (Recompute(), Recompute(modules=[""])):
        sharded = ShardedModule(model, plan, recompute=recompute)
        for _ in range(3):
            sharded(x).backward()
        found.append((sharded.full_state_dict(), sharded.full_gradients()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][0]["norm.num_batches_tracked"] == 3


def memory(group, options, keywords):
    """Return the bytes kept for backward without and with recompute, measured and estimated."""
    sizes = {"layers": 3, "width": 64, "dropout": 0.1}
    _, plain, recomputing, batch = models("GPT", (2,), options, **sizes, **keywords)
    measured = [alive_bytes(lambda model=model: model(*batch)) for model in (plain, recomputing)]
    each = (Recompute(), Recompute(**options))
    return measured, [saved_bytes(recomputing.rank_plan, recompute) for recompute in each]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_memory_between_forward_and_backward(ranks, overlap):
    def found(**options):
        measured, estimated = ranks(2).run(memory, {**LAYERS, **options}, {"overlap": overlap})[1]
        assert estimated == pytest.approx(measured, rel=0.1)
        return measured

    plain, recomputing = found(collectives="recompute")
    assert recomputing < plain / 3  # the inputs of each layer, and embeddings, norm and loss
    _, kept = found()
    assert recomputing < kept < plain / 2
    _, excepted = found(keep=["layers.*:*elu"])  # a part of an operator's name is enough, as on a plain module
    numbers = 3 * 4 * 16 * 128  # elements of the results of gelu in 3 layers on a rank
    assert excepted - kept == pytest.approx(8 * numbers, rel=0.01)
    _, single = found(modules=["layers.*:gelu"])
    assert plain - single == pytest.approx(8 * numbers, rel=0.01)


@pytest.mark.parametrize("again", [True, False])
def test_memory_of_gathered_rows(ranks, again):
    keywords = {"rows_cut": True, "settings": {**CHUNKS, "recompute_all_gather": again}}
    measured, estimated = ranks(2).run(memory, LAYERS, keywords)[1]
    assert estimated == pytest.approx(measured, rel=0.1)


@on_ranks(2)
def test_refusals(group):
    whole = made(small_models.GPT, dropout=0.3)
    batch = BATCHES["GPT"](torch.Generator().manual_seed(7))
    plan = planned("GPT", trace(whole, batch), mesh_of((2,)))

    def refused(match, error=StrategyError, **options):
        with pytest.raises(error, match=match):
            ShardedModule(whole, plan, recompute=Recompute(**options))

    refused("'blocks.*' names no module; there are layers", modules=["blocks.*"])
    refused(r"'layers.\*:silu' names nothing", modules=["layers.*:silu"])
    refused("'layers.*.upp' names nothing", modules=["layers.*"], keep=["layers.*.upp"])
    refused("'norm' names layer_norm.*, which is not recomputed", modules=["layers.*"], keep=["norm"])
    refused("dropout.*draws random numbers and cannot be kept", modules=["layers.*"], keep=["layers.*:dropout"])
    refused("give one of keep, recompute", ValueError, modules=["layers.*"], collectives="twice")
    refused("give a list of patterns", ValueError, modules="layers.*")
    refused("without recompute.modules", ValueError, keep=["layers.*"])
    with pytest.raises(DisagreementError, match="recompute is Recompute"):
        ShardedModule(whole, plan, recompute=Recompute(modules=["layers.*"] if group.rank() else []))


def own_sums(group, options):
    """A cross-entropy over a sharded vocabulary runs all-reduces inside the operator."""
    whole = made(small_models.Llama)
    batch = BATCHES["Llama"](torch.Generator().manual_seed(7))
    cut = {"head": ([None, ("mp", None)], None), ":cross_entropy_loss": ([(None, "mp")], None)}
    plan = propagate(trace(whole, batch), mesh_of((group.size(),)), cut, objective="redistribution")
    assert plan.op_collectives
    found = []
    for recompute in (Recompute(), Recompute(**options)):
        model = ShardedModule(whole, plan, recompute=recompute, bucket_bytes=0)
        found += collectives_of(lambda model=model: bits(model, batch))
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
    return sum(found[3].values()) - sum(found[1].values())


@pytest.mark.slow
def test_collectives_inside_of_an_operator(ranks):
    behind = {"modules": [""]}
    assert ranks(2).run(own_sums, behind) == [0, 0]
    assert ranks(2).run(own_sums, {**behind, "keep": [":cross_entropy_loss"]}) == [0, 0]
    assert min(ranks(2).run(own_sums, {**behind, "collectives": "recompute"})) > 0
