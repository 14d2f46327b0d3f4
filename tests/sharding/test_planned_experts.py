"""Mixtures of experts in a plan: tokens go to their experts along a mesh dimension, equal to one card in float64."""

from collections import Counter
from itertools import product
from unittest import mock

import hf_decoders as example
import pytest
import torch
from brute_force import call_of, check, describe, fits
from decoders import check_step
from marks import promise
from pool import on_ranks
from sharded_models import EXACT
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.expert_exchange import ExpertGroup
from ascend_parallel.settings import Settings
from ascend_parallel.sharding import ProcessMesh, ShardedModule, mixture_of_experts, parallelize, propagate, trace
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, SUM, shard
from ascend_parallel.sharding.planner.operator_cost import seconds
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.rules import experts as rule
from ascend_parallel.sharding.rules import strategies
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.training import PipelineOptions, ShardingOptions, Strategy
from ascend_parallel.training.step_collectives import step_collectives
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

H, F_, EXPERTS, BATCH, LENGTH = 8, 12, 8, 4, 6
SLOW = pytest.mark.slow


class Experts(nn.Module):
    """A router of which half of the experts are hardly ever chosen, and gated experts or plain ones."""

    def __init__(self, top=2, gated=True):
        super().__init__()
        self.top, self.router = top, nn.Linear(H, EXPERTS)
        self.router.bias.data[EXPERTS // 2 :] -= 4.0
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, F_, H)), nn.Parameter(torch.randn(EXPERTS, H, F_))
        self.gate = nn.Parameter(torch.randn(EXPERTS, F_, H)) if gated else None

    def forward(self, x):
        chosen, index = self.router(x).softmax(-1).topk(self.top)
        return mixture_of_experts(x, index, chosen, self.up, self.down, self.gate, activation="gelu")


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, H), nn.Linear(H, 32)
        self.layers = nn.ModuleList(Experts(**options) for _ in range(2))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (H,)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def model_and_batch(**options):
    torch.manual_seed(7)
    model = Model(**options).double()
    tokens = torch.randint(32, (BATCH, LENGTH + 1))
    return model, (tokens[:, :-1], tokens[:, 1:])


def mesh_of(sizes):
    return ProcessMesh(torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values()), list(sizes))


def plan_of(model, batch, sizes, strategies=None, **options):
    options.setdefault("data_dim", "dp" if "dp" in sizes else None)
    return propagate(trace(model, batch), mesh_of(sizes), strategies or {}, expert_dim="ep", **options)


def mixtures(plan):
    return [name for name, node in plan.graph.nodes.items() if node.call and "mixture" in node.call.name]


def compare(model, batch, plan, **options):
    """Compare the loss and every gradient with one card."""
    expected = model(*batch)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    sharded = ShardedModule(model, plan, **options)
    loss = sharded(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(sharded.full_gradients(), gradients, **EXACT)
    return sharded


def trained(group, sizes, groups, options):
    model, batch = model_and_batch(**options)
    plan = plan_of(model, batch, sizes)
    along = plan.mesh.dim_names.index("ep")
    assert len(mixtures(plan)) == 2
    for name in mixtures(plan):
        assert {layout[along] for layout in plan.inputs[name]} == {shard(0)}
    COUNTS.clear()
    sharded = compare(model, batch, plan, settings=Settings(num_chunks=groups))
    counted = COUNTS.as_dict()["expert_exchange"]
    # two layers, forward and backward; each group sends rows and gets them back
    assert counted == {"calls": 4, "chunks": 4 * groups, "collectives": 8 * groups}, counted
    held = {name: tuple(parameter.shape) for name, parameter in sharded.named_parameters()}
    assert held["layers.0.up"] == (EXPERTS // sizes["ep"], F_, H)
    assert held["layers.1.down"] == (EXPERTS // sizes["ep"], H, F_)


@promise("planned-experts")
@pytest.mark.parametrize(
    ("sizes", "groups", "options"),
    [
        ({"ep": 2}, 2, {}),
        ({"ep": 2}, 1, {"top": 1, "gated": False}),
        ({"dp": 2, "ep": 2}, 4, {}),
        pytest.param({"ep": 4}, 2, {"top": 3}, marks=SLOW),
    ],
    ids=str,
)
def test_tokens_go_to_their_experts(ranks, sizes, groups, options):
    ranks(torch.Size(sizes.values()).numel()).run(trained, sizes, groups, options)


INSIDE_EXPERTS = [("ep", 1, 1)] * 3 + [("ep", "tp", 1), ("ep", 1, "tp"), ("ep", "tp", 1)]


@promise("planned-experts")
@pytest.mark.slow
@on_ranks(4)
def test_experts_of_which_each_is_divided_too(group):
    model, batch = model_and_batch()
    plan = plan_of(model, batch, {"ep": 2, "tp": 2}, {"layers.*:mixture_of_experts": (INSIDE_EXPERTS, None)})
    for name in mixtures(plan):
        assert plan.inputs[name][3:] == ((shard(0), shard(1)), (shard(0), shard(2)), (shard(0), shard(1)))
        assert plan.layouts[Value(name)] == (shard(0), SUM)
    sharded = compare(model, batch, plan)
    assert dict(sharded.named_parameters())["layers.0.up"].shape == (EXPERTS // 2, F_ // 2, H)


@pytest.mark.parametrize("collectives", ["keep", "recompute"])
@on_ranks(2)
def test_tokens_are_exchanged_again_where_backward_recomputes(group, collectives):
    model, batch = model_and_batch()
    plan = plan_of(model, batch, {"ep": 2})
    recompute = Recompute(modules=("layers.*",), collectives=collectives)
    COUNTS.clear()
    sharded = compare(model, batch, plan, recompute=recompute)
    assert COUNTS.as_dict()["expert_exchange"]["calls"] == 6
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        sharded(*batch).backward()
    ran = Counter(event.name for event in profiled.events())["gloo:all_to_all"]
    listed = step_collectives(Strategy(mesh={"dp": 2}, recompute=recompute), sharded.rank_plan).micro_batch.counts
    assert listed["all_to_all"] == 2 * 6  # dispatch and combine
    assert ran == listed["all_to_all"] + 4 + listed.get("reduce_scatter", 0)  # and the numbers of rows, in each forward


@on_ranks(2)
def test_the_models_own_code_runs_with_the_same_gradients(group):
    model, batch = model_and_batch()
    plan = plan_of(model, batch, {"ep": 2})
    expected = model(*batch)
    expected.backward()
    eager = parallelize(model_and_batch()[0], plan)
    loss = eager(*batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad, **EXACT)


@on_ranks(2)
def test_rows_of_another_expert_are_seen(group):
    """Rows that are left in the order of their ranks reach the wrong experts."""
    as_received = {name: lambda _, rows: rows for name in ("by_expert", "by_source")}
    with mock.patch.multiple(ExpertGroup, **as_received):
        model, batch = model_and_batch()
        with pytest.raises(AssertionError, match="not close"):
            compare(model, batch, plan_of(model, batch, {"ep": 2}))


# Mixtral's router computes its softmax in float32.
ROUNDED = {"rtol": 1e-4, "atol": 1e-6}


def mixtral(group, mesh, options):
    changes = {"experts_implementation": "mixture_of_experts"}
    batch = example.batch_of(0, 4)
    return check_step(
        "Mixtral", Strategy(mesh=mesh, **options), changes, {"experts_implementation": "batched_mm"}, ROUNDED, batch
    )


@promise("planned-experts")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"expert_dim": "dp"}),
        pytest.param({"dp": 2, "ep": 2}, {"expert_dim": "ep"}, marks=SLOW),
        pytest.param({"dp": 1, "ep": 4}, {"expert_dim": "ep"}, marks=SLOW),
        pytest.param({"dp": 2}, {"expert_dim": "dp", "sharding": ShardingOptions(zero_stage=2)}, marks=SLOW),
        pytest.param(
            {"dp": 2}, {"expert_dim": "dp", "pipeline": PipelineOptions(degree=2, micro_batches=2)}, marks=SLOW
        ),
    ],
    ids=["dp", "dp x ep", "ep", "dp with ZeRO", "dp x pp"],
)
def test_mixtral_of_transformers_trains_as_on_one_card(ranks, mesh, options):
    stages = options["pipeline"].degree if "pipeline" in options else 1
    ranks(torch.Size(mesh.values()).numel() * stages).run(mixtral, mesh, options)


OPERATOR = torch.ops.ascend_parallel_moe.mixture_of_experts.default


def arguments(gated=True, dims=(4, 6)):
    torch.manual_seed(1)
    tokens = torch.randn(*dims, H, dtype=torch.float64)
    scores, index = torch.rand(*dims, EXPERTS, dtype=torch.float64).topk(2)
    up, down = torch.randn(EXPERTS, F_, H, dtype=torch.float64), torch.randn(EXPERTS, H, F_, dtype=torch.float64)
    return [tokens, index, scores, up, down, torch.randn_like(up)] if gated else [tokens, index, scores, up, down]


@pytest.mark.parametrize(("gated", "mesh"), [(True, (2,)), (False, (2,)), (True, (2, 2))], ids=str)
def test_strategies_without_an_exchange_give_the_whole(gated, mesh):
    call, tensors = call_of(OPERATOR, *arguments(gated))
    seen = set()
    for chosen in product(strategies(call), repeat=len(mesh)):
        layouts = list(zip(*(strategy.inputs for strategy in chosen), strict=True))
        if fits(call, chosen, mesh) and not rule.exchange_dims(layouts):
            check(call, tensors, chosen, mesh)
            seen.add(describe(chosen))
    more = " S(1)" if gated else ""
    assert len(mesh) > 1 or f"R* R R* S(1) S(2){more} -> P(sum)" in seen
    assert len(seen) == {1: 6, 2: 35}[len(mesh)]  # 6 tokens are not cut twice


@pytest.mark.parametrize("activation", sorted(rule.ACTIVATIONS))
def test_the_operator_is_the_sum_of_the_chosen_experts(activation):
    given = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in arguments(dims=(5,))]
    x, index, weight, up, down, gate = given
    with torch.no_grad():
        index[0, 0] = EXPERTS  # chooses none
    act = rule.ACTIVATIONS[activation]
    rows = [
        sum(
            weight[t, s] * (down[e] @ (act(gate[e] @ x[t]) * (up[e] @ x[t])))
            for s, e in enumerate(index[t].tolist())
            if e < EXPERTS
        )
        for t in range(5)
    ]
    expected, found = torch.stack(rows), mixture_of_experts(*given, activation=activation)
    torch.testing.assert_close(found, expected, **EXACT)
    leaves, dy = [x, weight, up, down, gate], torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy), **EXACT
    )


def test_the_plan_counts_and_prices_its_all_to_alls():
    model, batch = model_and_batch()
    plan = plan_of(model, batch, {"ep": 4})
    assert plan.collectives()["all_to_all"] == 8
    rows = BATCH * LENGTH * 2  # of the top 2
    for name in mixtures(plan):
        steps = plan.op_collectives[name]
        assert [step.kind for step in steps] == ["all_to_all"] * 4
        assert {step.nbytes for step in steps} == {rows / 4 * H * 8 * 3 / 4}
        assert {step.seconds for step in steps} == {plan.costs.seconds("all_to_all", rows * H * 8, 0)}
        assert all("all_to_all" in text for text in plan.texts_inside(name))


@pytest.mark.parametrize(
    ("tokens", "weights", "rows"),
    [(REPLICATE, REPLICATE, 6), (shard(0), PARTIAL_GRAD, 3), (shard(0), shard(0), 6), (PARTIAL_GRAD, shard(0), 6)],
    ids=str,
)
def test_the_time_of_experts_is_that_of_their_matmuls(tokens, weights, rows):
    """24 tokens, 2 experts each, 8 experts: 6 rows an expert, of all ranks; with activations, and rows put in order."""
    call, _ = call_of(OPERATOR, *arguments())
    option = Option(((tokens,),) * 3 + ((weights,),) * 3, ((tokens,),))
    model = CostModel(find_hardware("910b"))
    own = EXPERTS // (2 if weights == shard(0) else 1)
    once = own * (2 * model.matmul(rows, H, F_, 8) + model.matmul(rows, F_, H, 8))
    wide = model.matmul(rows, F_, H, 8) + model.matmul(F_, rows, H, 8)  # gradients of the rows, and of a weight
    narrow = model.matmul(rows, H, F_, 8) + model.matmul(H, rows, F_, 8)
    tokens_here = 24 // (2 if tokens == shard(0) else 1)
    moved = model.stream(8 * (3 * own * rows * F_ + 4 * 2 * tokens_here * H))
    expected = once + own * (2 * wide + narrow) + 3 * moved
    assert seconds(call, option, (2,), model) == pytest.approx(expected, rel=1e-12)


class OfEachExpert(nn.Module):
    """A linear layer of each expert, of rows [E, ..., K]."""

    def __init__(self, features, inner):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, features, inner))

    def forward(self, x):
        return torch.einsum("ebck,enk->ebcn", x, self.weight)


class Capacity(nn.Module):
    """Experts written with a capacity: each sample sends at most C tokens to an expert; the others are dropped."""

    C = 3

    def __init__(self):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(H, EXPERTS), OfEachExpert(F_, H), OfEachExpert(H, F_)

    def forward(self, x, y):
        score, index = self.router(x).softmax(-1).max(-1)
        chosen = (index.unsqueeze(-1) == torch.arange(EXPERTS)).to(x.dtype)
        place = (chosen.cumsum(1) * chosen).sum(-1) - 1
        slot = (place.unsqueeze(-1) == torch.arange(self.C)).to(x.dtype)
        mask = chosen.unsqueeze(-1) * slot.unsqueeze(-2)  # [batch, tokens, experts, C]
        sent = torch.einsum("btec,bth->ebch", mask, x)
        back = torch.einsum("btec,ebch->bth", mask * score[..., None, None], self.down(F.silu(self.up(sent))))
        return (x + back - y).square().mean()


@promise("planned-experts")
@on_ranks(2)
def test_experts_with_a_capacity_are_exchanged_by_the_plan(group):
    torch.manual_seed(3)
    model = Capacity().double()
    batch = torch.randn(BATCH, LENGTH, H, dtype=torch.float64), torch.randn(BATCH, LENGTH, H, dtype=torch.float64)
    experts = {f"{name}:einsum": ([("ep", 1, 1, 1), ("ep", 1, 1)], None) for name in ("up", "down")}
    experts |= {f"weights:{name}.weight": (None, [("ep", 1, 1)]) for name in ("up", "down")}
    plan = plan_of(model, batch, {"ep": 2}, experts)
    assert plan.collectives()["all_to_all"] == 3  # to the experts; back, and with the gradients
    sharded = compare(model, batch, plan)
    assert dict(sharded.named_parameters())["up.weight"].shape == (EXPERTS // 2, F_, H)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"activation": "swish"}, "activation='swish'; give one of silu"),
        ({"index": torch.zeros(4, 6, 2)}, "index is torch.float32; give integers"),
        ({"down": torch.zeros(EXPERTS, F_, H)}, r"down \[8, 12, 8\].*; give x"),
    ],
)
def test_what_does_not_fit_is_refused(changed, words):
    names = ("x", "index", "weight", "up", "down", "gate")
    with pytest.raises(ValueError, match=words):
        mixture_of_experts(**{**dict(zip(names, arguments(), strict=True)), **changed})


def test_a_mesh_dimension_that_cannot_hold_the_experts_is_refused():
    model, batch = model_and_batch()
    with pytest.raises(ValueError, match="expert_dim='tp'"):
        propagate(trace(model, batch), mesh_of({"ep": 2}), expert_dim="tp")
    with pytest.raises(ValueError, match=r"layers.0 has tokens .* 8 experts: the mesh dimension"):
        plan_of(model, batch, {"ep": 3})
