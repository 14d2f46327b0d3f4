"""Sequences cut through causal attention: keys and values gathered, equal to one card in float64."""

import hf_decoders as example
import pytest
import small_models
import torch
from decoders import check_step, decoder, in_float64, sgd
from marks import promise
from pool import on_ranks
from sharded_models import EXACT, made

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.rules import registry
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training import Strategy, train_step
from ascend_parallel.training.options import StrategyOptionError

LENGTH = 512
ATTENTION = "aten.scaled_dot_product_attention"
HEADS = {
    "layers.*.attention.[qkv]": ([None, ("tp", 1)], None),
    "layers.*.attention.o": ([None, (1, "tp")], None),
}


def model_and_batch(rows):
    tokens = torch.randint(64, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return made(small_models.Llama, length=LENGTH), (tokens[:, :-1], tokens[:, 1:])


def planned(graph, sizes, objective="redistribution"):
    mesh = ProcessMesh(torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values()), list(sizes))
    data = "dp" if "dp" in sizes else None
    strategies = HEADS if "tp" in sizes else {}
    return propagate(graph, mesh, strategies, objective=objective, data_dim=data, sequence_dim="cp")


def trained(group, sizes, objective="redistribution"):
    whole, batch = model_and_batch(sizes.get("dp", 1))
    plan = planned(trace(whole, batch), sizes, objective)
    check_cut(plan)
    expected = whole(*batch)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    sharded = ShardedModule(whole, plan)
    loss = sharded(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(sharded.full_gradients(), gradients, **EXACT)
    eager = parallelize(model_and_batch(1)[0], plan)
    eager(*batch).backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], **EXACT)


def check_cut(plan):
    """The queries of every attention are cut along cp; keys and values are gathered before they are repeated."""
    place = plan.mesh.dim_names.index("cp")
    nodes = plan.graph.nodes.values()
    attentions = [node for node in nodes if node.call is not None and node.call.name.startswith(ATTENTION)]
    assert len(attentions) == 2
    for node in attentions:
        assert [layout[place] for layout in plan.inputs[node.name]] == [shard(2), PARTIAL_GRAD, PARTIAL_GRAD]
        assert plan.layouts[Value(node.name)][place] == shard(2)


@promise("planned-context")
@pytest.mark.sample(1)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_long_sequence_has_the_gradients_of_one_card(ranks, cp):
    ranks(cp).run(trained, {"cp": cp})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_with_data_and_tensor_parallelism(ranks, sizes):
    ranks(4).run(trained, sizes, "time")


def test_keys_are_gathered_before_their_heads_are_repeated():
    model, batch = model_and_batch(1)
    plan = planned(trace(model, batch), {"cp": 2})
    gathers = [one for one in plan.conversions if any(step.kind == "all_gather" for step in one.ahead.steps)]
    assert {plan.graph.meta(one.value).shape[1] for one in gathers if len(plan.graph.meta(one.value).shape) == 4} == {2}


@on_ranks(2)
def test_the_sequence_is_exchanged_for_the_heads(group):
    """A GPT, whose keys have as many heads as its queries: the plan exchanges the sequence for the heads."""
    model = made(small_models.GPT, length=LENGTH)
    _, batch = model_and_batch(1)
    plan = planned(trace(model, batch), {"cp": 2})
    nodes = plan.graph.nodes.values()
    attentions = [node for node in nodes if node.call is not None and node.call.name.startswith(ATTENTION)]
    assert {plan.layouts[Value(node.name)] for node in attentions} == {(shard(1),)}
    whole, sharded = model(*batch), ShardedModule(model, plan)
    loss = sharded(*batch)
    whole.backward()
    loss.backward()
    torch.testing.assert_close(loss, whole, **EXACT)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), gradients, **EXACT)


@on_ranks(2)
def test_queries_without_their_place_are_seen(group):
    """Attention of a rank's queries as if they were the first of the sequence."""
    kept = registry.ENTRIES[ATTENTION]
    registry.ENTRIES[ATTENTION] = registry.RegisteredRule(kept.rule)
    try:
        with pytest.raises(AssertionError, match="not close"):
            trained(group, {"cp": 2})
    finally:
        registry.ENTRIES[ATTENTION] = kept


def hugging_face(group, name, tp, stages):
    changes = {"max_position_embeddings": 128}
    strategy = example.strategy_of(name, 1, tp, stages, 2, **changes)
    return check_step(name, strategy, changes, batch=example.batch_of(0, stages, 128))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "stages"), [("Llama", 2, 1), ("GPT2", 1, 2)])
def test_decoders_of_hugging_face(ranks, name, tp, stages):
    held = ranks(4).run(hugging_face, name, tp, stages)
    assert set().union(*held) == set(dict(decoder(name).named_parameters()))


@on_ranks(2)
def test_every_rank_gives_its_part_of_the_sequence(group):
    (tokens,) = example.batch_of(0, 1, 64)
    strategy = Strategy(mesh={"cp": 2}, data_dim=None, sequence_dim="cp")
    with in_float64("Llama"):
        model = decoder("Llama")
        expected = example.loss(model, tokens)
        step = train_step(model, (tokens,), sgd(model), strategy, loss=example.loss, local_batches=True)
        loss = step(tokens.chunk(2, dim=1)[group.rank()])
    step.close()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)


def test_a_sequence_dimension_that_does_not_fit_is_refused():
    for options in ({"sequence_dim": "cp"}, {"sequence_dim": "dp"}, {"sequence_dim": "tp", "mode": "semi_auto"}):
        with pytest.raises(StrategyOptionError, match=r"sequence_dim='\w+': the mesh has dp, tp; name one of those"):
            Strategy(**{"mode": "auto", "mesh": {"dp": 2, "tp": 2}, **options})
    model, batch = model_and_batch(1)
    graph, mesh = trace(model, batch), ProcessMesh([0, 1], ["cp"])
    with pytest.raises(ValueError, match=r"sequence_dim='sp': give one of the mesh dimensions cp"):
        propagate(graph, mesh, sequence_dim="sp", objective="redistribution")
    with pytest.raises(ValueError, match=r"another than that of the data"):
        propagate(graph, mesh, semi_auto="cp", sequence_dim="cp", objective="redistribution")
