"""The overlap pass: matmuls fused with collectives, against values and gradients of the unsharded model in float64."""

import itertools
from unittest import mock

import pytest
import small_models
import torch
import torch.distributed as dist
from agreements import agreements
from pairwise import pairwise
from plans import by_hand, planned_collectives
from pool import on_ranks
from sharded_models import (
    CHUNKS,
    EXACT,
    FORMS,
    GIVEN,
    MLP,
    PARTIAL,
    S0,
    S1,
    S2,
    C,
    calls_of,
    collectives_of,
    compare,
    made,
    mesh_of,
    planned,
    seen,
    sequence_parallel,
    step,
    tensor_parallel,
    tokens_of,
)
from torch import nn

import ascend_parallel
from ascend_parallel import Settings
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, SUM, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime import overlapped_linear
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.tuning.measured import decider
from ascend_parallel.tuning.measured.tuner import TunedPass


def run_mlp(group, form, shape, overlap, settings=(), bias=True):
    model, x = made(MLP, bias=bias), torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = FORMS[form](trace(model, (x,)), ProcessMesh(list(range(group.size())), ["mp"]))
    settings = Settings(**dict(settings))
    sharded = ShardedModule(model, plan, overlap=overlap, settings=settings, bucket_bytes=0)
    ascend_parallel.ops.COUNTS.clear()
    compare(model, sharded, x)
    kinds = {}
    for event, count in sharded.collective_counts.items():
        kinds[event.kind, event.direction] = kinds.get((event.kind, event.direction), 0) + count
    return (
        calls_of(ascend_parallel.ops.COUNTS.as_dict()),
        kinds,
        sharded.fused,
        seen(sharded) == planned_collectives(plan),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 3])
def test_tensor_parallel_mlp(ranks, count):
    for bias, settings in itertools.product((True, False), ({}, CHUNKS)):
        for counts, kinds, fused, _ in ranks(count).run(run_mlp, "tensor", (48, 2, 12), True, settings, bias):
            assert counts == {"matmul_all_reduce": 2}  # the row layer's in forward, the column layer's in backward
            assert kinds == {}
            assert [fusion.operator for fusion in fused] == ["matmul_all_reduce"] * 2
    for counts, kinds, fused, as_planned in ranks(count).run(run_mlp, "tensor", (48, 2, 12), False):
        assert (counts, fused, as_planned) == ({}, (), True)
        # in backward the column layer's input, and the row layer's bias, which only the first rank adds
        assert kinds == {("all_reduce", "forward"): 1, ("all_reduce", "backward"): 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form, shape", [("sequence", (96, 2, 12)), ("samples", (1, 96, 12)), ("samples", (2, 48, 12))])
@pytest.mark.parametrize("count", [2, 3])
def test_sequence_parallel_mlp(ranks, count, form, shape):
    # The collectives outside of the operators: the gather of x after backward, the gather of the output for the user,
    # and the sums of the gradients of `scale` and of the row layer's bias, which see only their rows.
    around = {("all_gather", "forward"): 1, ("all_gather", "backward"): 1, ("all_reduce", "backward"): 2}
    for settings in ({}, CHUNKS, {"recompute_all_gather": False}):
        for counts, kinds, fused, _ in ranks(count).run(run_mlp, form, shape, True, settings):
            assert counts == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
            assert kinds == around
            assert [fusion.operator for fusion in fused] == ["matmul_reduce_scatter", "all_gather_matmul"]
    for counts, kinds, fused, as_planned in ranks(count).run(run_mlp, form, shape, False):
        assert (counts, fused, as_planned) == ({}, (), True)
        own = {("all_gather", "forward"): 1, ("all_gather", "backward"): 1}
        own |= {("reduce_scatter", "forward"): 1, ("reduce_scatter", "backward"): 1}
        assert kinds == {key: around.get(key, 0) + own.get(key, 0) for key in around | own}


@on_ranks(2)
def test_sequence_parallel_llama(group):
    """Two samples, the residual stream sharded along the sequence; return collectives in and outside of operators."""
    model = made(small_models.Llama, length=64)
    tokens = tokens_of(2, torch.Generator().manual_seed(2), 64)
    graph, mesh = trace(model, (tokens, tokens)), mesh_of((group.size(),))
    sharded = ShardedModule(model, planned("Llama", graph, mesh, rows_cut=True), settings=Settings(**CHUNKS))
    ascend_parallel.ops.COUNTS.clear()
    compare(model, sharded, tokens, tokens)
    apart = sorted({event.value.node for event in sharded.collective_counts})
    joined = sharded.fused[4]
    counts, joined = calls_of(ascend_parallel.ops.COUNTS.as_dict()), (joined.operator, joined.reason)
    # 4 halves of layers: a gather and a reduce-scatter in forward, and one of each in backward
    assert counts == {"all_gather_matmul": 8, "matmul_reduce_scatter": 8}
    # outside are the norms' weights, and the stream before and after the layers
    norms = {f"p_layers_{layer}_norm{number}_weight" for layer in (0, 1) for number in (1, 2)}
    assert set(apart) - norms <= {"embedding", "mul_18"}
    assert joined == (
        "all_gather_matmul",
        "the gather of its rows over mp, transposed for S(1), one matmul with linear_1, linear_2",
    )


@on_ranks(2)
def test_one_chunk_that_keeps_its_gathered_rows_runs_the_collectives_of_no_overlap(group):
    found, batch = [], (torch.randn(48, 2, 12, dtype=torch.float64),)
    model = made(MLP)
    plan = sequence_parallel(trace(model, batch), mesh_of((2,)))
    for overlap, again in ((False, True), (True, False), (True, True)):
        settings = Settings(mode=2, recompute_all_gather=again)
        sharded = ShardedModule(model, plan, overlap=overlap, settings=settings)
        y, forward = collectives_of(lambda sharded=sharded: sharded(*batch))
        _, backward = collectives_of(y.sum().backward)
        found.append(sum(forward.values()) + sum(backward.values()))
    without, kept, again = found
    assert again > kept == without > 0


def in_two_chunks(layer, operator, parts):
    """Keep two chunks, in place of what is timed. A block's second run, in backward, must measure nothing."""
    assert torch._C._current_graph_task_id() == -1
    return TunedPass(layer.sizes_as_run(operator, split_rows(parts.rows, 2)), 1.0, 0.5)


def one_chunk(layer, operator, parts):
    """Keep one chunk."""
    return TunedPass((parts.rows,), 1.0, 1.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("count", "form", "recompute"), pairwise([2, 3, 4], FORMS, [None, "keep", "recompute"]), ids=str
)
@on_ranks()
def test_what_was_measured_cuts_the_matmuls_of_a_plan(group, form, recompute):
    model, x = made(MLP), torch.randn(48, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = FORMS[form](trace(model, (x,)), mesh_of((group.size(),)))
    overlapped_linear._decider.cache_clear()  # ranks of these tests live on, and know what they have measured
    again = recompute and Recompute(modules=[""], collectives=recompute)
    sharded = ShardedModule(model, plan, settings=Settings(auto=True), recompute=again)
    with mock.patch.object(decider, "confirmed", in_two_chunks):
        compare(model, sharded, x)
    ascend_parallel.ops.COUNTS.clear()
    compare(model, sharded, x)
    counts = ascend_parallel.ops.COUNTS.as_dict()
    assert all(count["chunks"] == 2 * count["calls"] > 0 for count in counts.values()), counts
    assert len(counts) == (1 if form == "tensor" else 2)


@on_ranks(4)
def test_replicas_run_the_same_chunks(group):
    """Each half of the ranks measures another number of chunks: both run the fewest."""

    def unlike(layer, operator, parts):
        return TunedPass(layer.sizes_as_run(operator, split_rows(parts.rows, 2 + dist.get_rank() // 2)), 1.0, 0.5)

    model, x = made(MLP), torch.randn(48, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    overlapped_linear._decider.cache_clear()
    cuts = {"up": (((None, None, None), ("mp", None)), None), "down": (((None, None, "mp"), (None, "mp")), None)}
    plan = propagate(trace(model, (x.requires_grad_(),)), mesh_of((2, 2)), cuts, hardware="cpu-gloo")
    sharded = ShardedModule(model, plan, overlap=True, settings=Settings(auto=True))
    with mock.patch.object(decider, "confirmed", unlike):
        sharded(x)
    ascend_parallel.ops.COUNTS.clear()
    compare(model, sharded, x.detach())
    counts = ascend_parallel.ops.COUNTS.as_dict()
    assert counts
    assert all(count["chunks"] == 2 * count["calls"] for count in counts.values()), counts


@on_ranks(2)
def test_the_first_call_may_be_an_inference(group):
    overlapped_linear._decider.cache_clear()
    model, x = made(MLP), torch.randn(48, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = sequence_parallel(trace(model, (x,)), mesh_of((2,)))
    sharded = ShardedModule(model, plan, settings=Settings(auto=True))
    measured = []

    def timed(layer, operator, parts):
        measured.append(layer.time_sizes(operator, ((parts.rows,),), 1))
        return in_two_chunks(layer, operator, parts)

    with mock.patch.object(decider, "confirmed", timed):
        with torch.inference_mode():
            sharded(x)
        assert len(measured) == 4
        compare(model, sharded, x)
    assert len(measured) == 4


@on_ranks(2)
def test_weights_whose_slices_differ_do_not_overlap(group):
    """By hand, since no search cuts them so: 13 and 12 columns could be cut in unlike chunks."""
    model, x = made(MLP, wide=25), torch.randn(48, 12, 12, dtype=torch.float64)
    sharded = ShardedModule(model, tensor_parallel(trace(model, (x,)), mesh_of((2,))), settings=Settings(num_chunks=2))
    compare(model, sharded, x)
    assert {fusion.operator for fusion in sharded.fused} == {""}


@on_ranks(2)
def test_what_stays_whole_has_the_bits_of_one_chunk(group):
    overlapped_linear._decider.cache_clear()
    model, x = made(MLP), torch.randn(48, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan, found = sequence_parallel(trace(model, (x,)), mesh_of((2,))), []
    for settings in (Settings(mode=2), Settings(auto=True)):
        sharded = ShardedModule(model, plan, settings=settings)
        ascend_parallel.ops.COUNTS.clear()
        with mock.patch.object(decider, "confirmed", one_chunk):
            found.append([*step(sharded, x), sharded.full_gradients()])
        counts = ascend_parallel.ops.COUNTS.as_dict()
        assert all(count["chunks"] == count["calls"] > 0 for count in counts.values()), counts
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Products(nn.Module):
    """The three other operators that are a matrix product with a weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.first, self.second, self.bias = (nn.Parameter(torch.randn(size)) for size in ((8, 12), (12, 8), (8,)))
        self.third = nn.Parameter(torch.randn(8, 12))

    def forward(self, x):
        x = x * self.scale
        x = torch.addmm(self.bias, torch.mm(x, self.first).relu(), self.second)
        return torch.matmul(x.unflatten(0, (4, -1)), self.third)


@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_products_that_are_not_linear(group):
    model, x = made(Products), torch.randn(48, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    graph = trace(model, (x,))
    names = {node.call.name.split(".")[1]: node.name for node in graph.nodes.values() if node.call is not None}
    calls = {
        names["mm"]: ([C, S1], S1),
        names["relu"]: ([S1], S1),
        names["addmm"]: ([C, S1, S0], PARTIAL),
        names["matmul"]: ([C, S1], S2),
    }
    given = {"first": S1, "second": S0, "third": S1}
    plan = by_hand(graph, mesh_of((group.size(),)), given, calls, inputs_have_gradients=True)
    sharded = ShardedModule(model, plan, settings=Settings(**CHUNKS))
    ascend_parallel.ops.COUNTS.clear()
    compare(model, sharded, x)
    assert calls_of(ascend_parallel.ops.COUNTS.as_dict()) == {"matmul_all_reduce": 3}
    assert len(sharded.fused) == 3


class Siblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.first, self.second = nn.Linear(8, 12), nn.Linear(8, 4)

    def forward(self, x):
        x = x * self.scale
        return self.first(x), self.second(x)


@on_ranks(4)
def test_columns_of_one_input_are_one_matmul_and_convert_it_once(group):
    """Two column layers whose input is converted for each of them, on two mesh dimensions."""
    model, x = made(Siblings), torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    r, c, s0, s1 = REPLICATE, PARTIAL_GRAD, shard(0), shard(1)
    column = ([(r, c), (r, s0), (r, s0)], (r, s1))
    calls = {"mul": ([(s0, r), (c, r)], (s0, r)), "linear": column, "linear_1": column}
    given = {"first.weight": (r, s0), "first.bias": (r, s0), "second.weight": (r, s0), "second.bias": (r, s0)}
    given["x"] = (s0, r)
    sharded = ShardedModule(
        model, by_hand(trace(model, (x,)), mesh_of((2, 2)), given, calls), settings=Settings(**CHUNKS)
    )
    ascend_parallel.ops.COUNTS.clear()
    for module in (model, sharded):
        first, second = module(x)
        (first.square().sum() + second.sin().sum()).backward()
    torch.testing.assert_close(sharded.full_gradients(), {n: p.grad for n, p in model.named_parameters()}, **EXACT)
    gathers = [
        (event.reader, count)
        for event, count in sharded.collective_counts.items()
        if event.kind == "all_gather" and event.reader
    ]
    assert calls_of(ascend_parallel.ops.COUNTS.as_dict()) == {"matmul_all_reduce": 1}
    assert gathers == [("linear", 1)]


def reasons(plan_of, shape, mesh, **keywords):
    model = made(MLP, **keywords)
    graph = trace(model, (torch.zeros(shape, dtype=torch.float64),))
    return {fusion.node: (fusion.operator, fusion.reason) for fusion in plan_of(graph, mesh).fused(Settings()).fused}


def test_matmuls_that_are_not_fused_have_a_reason():
    mesh, pair = ProcessMesh([0, 1], ["mp"]), ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
    in_rows = reasons(sequence_parallel, (6, 2, 12), mesh)
    assert {reason for _, reason in in_rows.values()} == {"its sum over mp", "the gather of its rows over mp"}
    samples = reasons(FORMS["samples"], (2, 6, 12), mesh)
    assert samples == {
        "linear_1": ("matmul_reduce_scatter", "its sum over mp, transposed for S(1)"),
        "linear": ("all_gather_matmul", "the gather of its rows over mp, transposed for S(1)"),
    }
    assert reasons(FORMS["samples"], (1, 6, 12), mesh) == in_rows
    descending = reasons(sequence_parallel, (6, 2, 12), ProcessMesh([1, 0], ["mp"]))
    assert {operator for operator, _ in descending.values()} == {""}
    assert {reason for _, reason in descending.values()} == {"the ranks along mp do not ascend"}

    def features(graph, on):
        """The sum and the input are sharded along their features."""
        calls = {"linear": ([C, S0, S0], S2), "gelu": ([S2], S2), "linear_1": ([S2, S1, C], PARTIAL)}
        calls |= {"mul": ([S2, S0], S2), "add": ([S2, S2], S2)}
        return by_hand(graph, on, {**GIVEN, "x": S2, "scale": S0}, calls)

    cut = ("", "S(2) shards its features, not its rows")
    assert reasons(features, (6, 2, 12), mesh) == {"linear": cut, "linear_1": cut}

    def nested(graph, on):
        """Rows sharded by dp, features by mp: all matmuls can be fused."""
        r, c, s0, s1, s2 = REPLICATE, PARTIAL_GRAD, shard(0), shard(1), shard(2)
        calls = {
            "linear": ([(s0, c), (c, s0), (c, s0)], (s0, s2)),
            "gelu": ([(s0, s2)], (s0, s2)),
            "linear_1": ([(s0, s2), (c, s1), (c, c)], (s0, SUM)),
            "add": ([(s0, r), (s0, r)], (s0, r)),
            "mul": ([(s0, r), (c, r)], (s0, r)),
        }
        given = {"up.weight": (r, s0), "up.bias": (r, s0), "down.weight": (r, s1), "x": (s0, r)}
        return by_hand(graph, on, given, calls)

    assert {operator for operator, _ in reasons(nested, (4, 2, 12), pair).values()} == {"matmul_all_reduce"}

    def twice(graph, on):
        """Partial sums on both mesh dimensions: every rank of a dimension would add the bias."""
        c, s1, s2 = PARTIAL_GRAD, shard(1), shard(2)
        calls = {"linear_1": ([(s2, s2), (s1, s1), (c, c)], (SUM, SUM))}
        return by_hand(graph, on, {"down.weight": (s1, s1)}, calls)

    found = reasons(twice, (4, 2, 12), pair)
    assert found == {"linear_1": ("", "it has a bias, and partial sums on another mesh dimension")}
    assert reasons(twice, (4, 2, 12), pair, bias=False)["linear_1"][0] == "matmul_all_reduce"


@pytest.mark.parametrize("form", ["tensor", "sequence"])
@on_ranks(2)
def test_all_kernels_of_a_plan_are_asked_about_their_bits_in_one_agreement(group, form):
    model, x = (
        made(MLP, 20, 36),
        torch.randn(64, 4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    plan = FORMS[form](trace(model, (x,)), ProcessMesh([0, 1], ["mp"]))
    sharded = ShardedModule(model, plan, settings=Settings(num_chunks=4), bucket_bytes=0)
    with agreements() as asked:
        compare(model, sharded, x)
    assert asked == [2 if form == "tensor" else 4]  # two layers, whose forward and backward have a collective
