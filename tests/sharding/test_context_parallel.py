"""Sequences that ranks share: heads exchanged, or keys and values gathered, equal to one card in float64."""

from dataclasses import replace
from unittest import mock

import hf_decoders as example
import pytest
import small_models
import torch
from decoders import check_step, decoder, in_float64, sgd
from marks import promise
from pool import on_ranks
from sharded_models import EXACT, made

from ascend_parallel.ops import COUNTS
from ascend_parallel.overlap import context
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.rules import attention
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.explain import explain, exposed_seconds
from ascend_parallel.training import Strategy, train_step
from ascend_parallel.training.options import StrategyOptionError

LENGTH = 512
ATTENTION = "aten.scaled_dot_product_attention"
HEADS = {
    "layers.*.attention.[qkv]": ([None, ("tp", 1)], None),
    "layers.*.attention.o": ([None, (1, "tp")], None),
}


def model_and_batch(rows, length=LENGTH, **model):
    tokens = torch.randint(64, (rows, length + 1), generator=torch.Generator().manual_seed(3))
    return made(small_models.Llama, length=length, **model), (tokens[:, :-1], tokens[:, 1:])


def planned(graph, sizes, objective="redistribution", **sharing):
    mesh = ProcessMesh(torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values()), list(sizes))
    data = "dp" if "dp" in sizes else None
    strategies = HEADS if "tp" in sizes else {}
    sharing |= {"only_data_cuts_batch": True} if data else {}
    return propagate(graph, mesh, strategies, objective=objective, data_dim=data, sequence_dim="cp", **sharing)


def trained(group, sizes, objective="redistribution", exchange=None, groups=None, model=None):
    whole, batch = model_and_batch(sizes.get("dp", 1), **(model or {}))
    plan = planned(trace(whole, batch), sizes, objective, sequence_exchange=exchange, sequence_groups=groups)
    check_cut(plan, exchange, groups)
    expected = whole(*batch)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    sharded = ShardedModule(whole, plan)
    loss = sharded(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(sharded.full_gradients(), gradients, **EXACT)
    eager = parallelize(model_and_batch(1, **(model or {}))[0], plan)
    eager(*batch).backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], **EXACT)


def attentions_of(plan):
    nodes = plan.graph.nodes.values()
    return [node for node in nodes if node.call is not None and node.call.name.startswith(ATTENTION)]


def check_cut(plan, exchange=None, groups=None):
    """Queries, keys and values of every attention are cut along cp: the operator exchanges them itself."""
    place = plan.mesh.dim_names.index("cp")
    assert len(attentions_of(plan)) == 2
    for node in attentions_of(plan):
        assert [layout[place] for layout in plan.inputs[node.name]] == [shard(2)] * 3
        assert plan.layouts[Value(node.name)][place] == shard(2)
        assert node.call.sequence.exchange == (exchange or node.call.sequence.exchange)
        assert node.call.sequence.groups == (groups or 1)


SHARED = [
    ({"cp": 2}, "heads", 2, {"heads": 8, "groups": 4, "width": 64, "length": 96}),
    ({"cp": 2}, "gather", 2, {"length": 96}),
    ({"cp": 3}, "heads", 1, {"heads": 6, "groups": 3, "width": 48, "length": 99}),
    ({"cp": 3}, "gather", 2, {"length": 99}),
    ({"cp": 4}, "heads", 1, {"length": 96}),
    ({"cp": 4}, "gather", 2, {"length": 124}),
]


@promise("planned-context")
@pytest.mark.sample(2)
@pytest.mark.parametrize(("sizes", "exchange", "groups", "model"), SHARED, ids=str)
def test_a_long_sequence_has_the_gradients_of_one_card(ranks, sizes, exchange, groups, model):
    ranks(sizes["cp"]).run(trained, sizes, "redistribution", exchange, groups, model)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_with_data_and_tensor_parallelism(ranks, sizes):
    ranks(4).run(trained, sizes, "time")


def test_keys_are_sent_as_before_their_heads_are_repeated():
    """The Llama repeats each head of keys twice: 2 x 2 heads of queries and outputs, and 2 x 1 of keys and values."""
    model, batch = model_and_batch(1)
    plan = planned(trace(model, batch), {"cp": 2}, sequence_exchange="heads")
    token = 32 // 4 * 8  # bytes of a head of a token
    for name in (node.name for node in attentions_of(plan)):
        sent = [step.nbytes for step in plan.op_collectives[name]]
        assert sent == 2 * [LENGTH // 2 * heads * token / 2 for heads in (4, 2, 2, 4)]


class Attention(torch.nn.Module):
    """Causal attention of queries, keys and values [B, S, heads, width]."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o.transpose(1, 2) * self.scale


def attended(group, heads, exchange, groups, dtype):
    """Return which of output and gradients of q, k and v have other bits than on one card."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(1, 132, count, 16, generator=generator).to(dtype) for count in (*heads, heads[1])]
    ranks, model = group.size(), Attention().to(dtype)
    traced = trace(model, tuple(x.clone().requires_grad_() for x in drawn))
    mesh = ProcessMesh(list(range(ranks)), ["cp"])
    plan = propagate(traced, mesh, sequence_dim="cp", sequence_exchange=exchange, sequence_groups=groups)
    (node,) = attentions_of(plan)
    assert node.call.sequence.exchange == exchange and plan.layouts[Value(node.name)] == (shard(2),)
    found = []
    for run in (model, ShardedModule(model, plan)):
        leaves = [x.clone().requires_grad_() for x in drawn]
        o = run(*leaves)
        o.backward(torch.ones_like(o))
        found.append({"o": o.detach(), **{name: x.grad for name, x in zip("qkv", leaves, strict=True)}})
    plain, shared = found
    for name, x in shared.items():
        torch.testing.assert_close(x, plain[name], rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2)
    return {name for name in plain if not torch.equal(plain[name], shared[name])}


BITS = [
    (2, (8, 4), "heads", 2, torch.float32, ""),
    (2, (8, 8), "heads", 4, torch.bfloat16, ""),
    (3, (6, 3), "heads", 1, torch.float32, ""),
    (4, (8, 8), "heads", 2, torch.float32, ""),
    (4, (6, 2), "gather", 2, torch.float32, "kv"),
]


@promise("planned-context-bits")
@pytest.mark.sample(2)
@pytest.mark.parametrize(("count", "heads", "exchange", "groups", "dtype", "summed"), BITS, ids=str)
def test_exchanged_heads_have_the_bits_of_one_card(ranks, count, heads, exchange, groups, dtype, summed):
    """With a gather the gradients of keys and values are sums over the ranks."""
    for different in ranks(count).run(attended, heads, exchange, groups, dtype):
        assert different <= set(summed)


WIDE = {"length": 64, "heads": 8, "groups": 4, "width": 64}


def projected(group, exchange, recompute):
    """Return what has other bits in two groups than in one, and whether the model's numbers are those of `project`."""
    whole, batch = model_and_batch(1, **WIDE)
    again = Recompute(modules=["layers.*"], collectives="recompute") if recompute else None

    def step(groups, project=context.project):
        plan = planned(trace(whole, batch), {"cp": 2}, sequence_exchange=exchange, sequence_groups=groups)
        model = ShardedModule(model_and_batch(1, **WIDE)[0], plan, recompute=again)
        with mock.patch.object(context, "project", project):
            loss = model(*batch)
        loss.backward()
        return {"loss": loss.detach(), **model.full_gradients()}

    own = context.project
    plain, found, wrong = step(1), step(2), step(2, lambda *operands: 1.1 * own(*operands))
    different = [name for name, x in plain.items() if not torch.equal(found[name], x)]
    return different, not torch.equal(wrong["loss"], found["loss"])


@promise("context-projection")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("exchange", "recompute"), [("heads", True), ("gather", False), ("heads", False)], ids=str)
def test_the_projection_of_a_plan_runs_under_the_exchange(ranks, exchange, recompute):
    for different, inside in ranks(2).run(projected, exchange, recompute):
        assert different == [] and inside


def surrounded(group, exchange, recompute, order):
    """Train on a mesh in another order than the ranks, with layers that run twice."""
    whole, batch = model_and_batch(1, length=64)
    plan = propagate(
        trace(whole, batch),
        ProcessMesh(order, ["cp"]),
        sequence_dim="cp",
        sequence_exchange=exchange,
        sequence_groups=2,
    )
    expected = whole(*batch)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    again = Recompute(modules=["layers.*"], collectives=recompute) if recompute else None
    sharded = ShardedModule(whole, plan, recompute=again)
    operator = "key_gather" if exchange == "gather" else "head_exchange"
    before = COUNTS.as_dict().get(operator, {"chunks": 0})["chunks"]
    loss = sharded(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(sharded.full_gradients(), gradients, **EXACT)
    exchanged = COUNTS.as_dict()[operator]["chunks"] - before
    groups = 2 if exchange == "gather" else 1  # 2 heads of keys, or one on each rank
    assert exchanged == 2 * groups * (3 if recompute else 2)  # of two layers: forward, again, backward


@pytest.mark.sample(1)
@pytest.mark.parametrize("exchange", ["heads", "gather"])
@pytest.mark.parametrize(
    ("recompute", "order"), [("keep", [0, 1]), ("recompute", [1, 0]), (None, [2, 0, 3, 1])], ids=str
)
def test_what_surrounds_an_exchange_changes_no_number(ranks, exchange, recompute, order):
    ranks(len(order)).run(surrounded, exchange, recompute, order)


class Masked(Attention):
    """Attention with a mask that is the same for all heads, of each sequence of a batch."""

    def forward(self, q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return o.transpose(1, 2) * self.scale


def masked(group, exchange):
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(1, 32, count, 8, generator=generator).double() for count in (4, 4, 4)]
    mask, model = torch.arange(32)[None] < 27, Masked().double()
    traced = trace(model, (*(x.clone().requires_grad_() for x in drawn), mask))
    plan = propagate(traced, ProcessMesh([0, 1], ["cp"]), sequence_dim="cp", sequence_exchange=exchange)
    (node,) = attentions_of(plan)
    assert node.call.sequence.exchange == exchange
    found = []
    for run in (model, ShardedModule(model, plan)):
        leaves = [x.clone().requires_grad_() for x in drawn]
        o = run(*leaves, mask)
        o.square().sum().backward()
        found.append([o.detach(), *(x.grad for x in leaves)])
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.parametrize("exchange", ["heads", "gather"])
def test_a_mask_of_padded_tokens_is_read_whole(ranks, exchange):
    ranks(2).run(masked, exchange)


def test_what_an_exchange_does_not_take_has_redistributions_around_it():
    """Dropout, and a bias of positions from parameters: as before, keys and values are gathered in front of them."""
    model = made(small_models.GPT, length=64)
    _, batch = model_and_batch(1, length=64)
    graph = trace(model, batch)
    dropping = replace(graph, nodes={name: with_dropout(node) for name, node in graph.nodes.items()})
    for one, exchanged in ((graph, True), (dropping, False)):
        plan = planned(one, {"cp": 2})
        assert {node.call.sequence is not None for node in attentions_of(plan)} == {exchanged}
        assert bool(plan.op_collectives) == exchanged


def with_dropout(node):
    call = node.call
    if call is None or not call.name.startswith(ATTENTION):
        return node
    return replace(node, call=replace(call, kwargs={**call.kwargs, "dropout_p": 0.5}))


@pytest.mark.parametrize(("heads", "expected"), [((8, 1), "gather"), ((16, 16), "heads")])
def test_the_plan_takes_the_way_of_least_time_and_says_why(heads, expected):
    """On 4 ranks one head of keys is gathered, and 16 are exchanged: either sends less than the other way."""
    mesh = ProcessMesh(list(range(4)), ["cp"])
    shapes = [torch.zeros(1, 4096, count, 128, device="meta") for count in (*heads, heads[1])]
    with torch.device("meta"):
        graph = trace(Attention(), tuple(x.requires_grad_() for x in shapes))
    cpu = {"sequence_dim": "cp", "hardware": "cpu-gloo"}
    ways = {way: propagate(graph, mesh, **cpu, sequence_exchange=way).cost for way in ("heads", "gather")}
    plan = propagate(graph, mesh, **cpu)
    (node,) = attentions_of(plan)
    assert node.call.sequence.exchange == expected
    assert plan.cost == pytest.approx(min(ways.values())) and ways[expected] == min(ways.values())
    taken, other = "keys and values gathered", "heads exchanged"
    taken, other = (taken, other) if expected == "gather" else (other, taken)
    text = explain(plan)
    assert f"inside: {taken} in 1 group: " in text and f"ms with what stays exposed; {other} in 1 group " in text
    if expected == "heads":
        grouped = propagate(graph, mesh, **cpu, sequence_groups=4)
        assert grouped.cost < plan.cost and f"{taken} in 4 groups: " in explain(grouped)
        assert exposed_seconds(grouped) < 0.75 * grouped.seconds and "stay exposed" in explain(grouped)


@on_ranks(2)
def test_queries_without_their_place_are_seen(group):
    """Attention of a rank's queries as if they were the first of the sequence."""
    kept = attention.lent_pieces
    attention.lent_pieces = lambda place, ranks, tokens: kept(0, ranks, tokens)
    try:
        with pytest.raises(AssertionError, match="not close"):
            trained(group, {"cp": 2}, "redistribution", "gather")
    finally:
        attention.lent_pieces = kept


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
    for options, words in (
        ({"sequence_exchange": "ring"}, "sequence_exchange='ring': give one of heads, gather; a plan runs no ring"),
        ({"sequence_groups": 0}, "sequence_groups=0: give a whole number from 1 to 64"),
    ):
        with pytest.raises(ValueError, match=words):
            propagate(graph, mesh, sequence_dim="cp", **options)
        with pytest.raises(StrategyOptionError, match=words):
            Strategy(mesh={"dp": 1, "cp": 2}, sequence_dim="cp", **options)
    with pytest.raises(StrategyOptionError, match="sequence_groups=2: no ranks share a sequence"):
        Strategy(mesh={"dp": 2}, sequence_groups=2)
    three = ProcessMesh([0, 1, 2], ["cp"])
    model, batch = model_and_batch(1, length=96)
    with pytest.raises(ValueError, match=r"layers\.0\.attention .* has 4 heads of queries, which 3 ranks cannot share"):
        propagate(trace(model, batch), three, sequence_dim="cp", sequence_exchange="heads")
