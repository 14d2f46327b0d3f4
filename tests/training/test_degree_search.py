"""The search for degrees: against exhaustive search, whole plans, and the simulation of schedules."""

import functools
import itertools
import random
import sys
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from brute_force_degrees import step_of_whole_plan

from ascend_parallel.settings import current_settings
from ascend_parallel.sharding import shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import MemoryLimitError, propagate
from ascend_parallel.training import Strategy, StrategyOptionError, recompute, search_degrees
from ascend_parallel.training.confirm_degrees import TracedByRows
from ascend_parallel.training.degrees import search as searching
from ascend_parallel.training.degrees.evaluation import ranges, stage_sums
from ascend_parallel.training.degrees.folding import FoldedGraph, fold
from ascend_parallel.training.degrees.rescaling import GraphFamily, LinearFit, UnevenError, rescaled
from ascend_parallel.training.degrees.search import rows_part
from ascend_parallel.training.degrees.space import Degrees, sequence_degrees
from ascend_parallel.training.degrees.work import work_of
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.tuning.cost_model.tables import PlanningError
from ascend_parallel.tuning.step_time.schedule import check
from ascend_parallel.tuning.step_time.timing import StageTimes, live, rank_ends, simulate

for folder in ("strategy", "sharding"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / folder))
from gpt import GPT  # noqa: E402
from small_models import Llama  # noqa: E402

OF_OPERATORS = ("forward", "backward", "forward_sent", "backward_sent")
OF_OPERATORS += ("touched", "sent", "unsharded", "crossing")
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)]


def gpt(layers=4, width=1024, rows=8):
    """Return a GPT on the meta device and a batch."""
    with torch.device("meta"):
        tokens = torch.zeros(rows, 512, dtype=torch.long)
        return GPT(layers, width, 8, 2048, 512), (tokens, tokens)


def llama(layers=6, rows=8):
    """Return a Llama on the meta device and a batch."""
    with torch.device("meta"):
        tokens = torch.zeros(rows, 256, dtype=torch.long)
        return Llama(layers, 512, 8, 4, 1024, 1024, 256), (tokens, tokens)


@functools.cache
def traced(make, rows=8):
    """Return a model for searches, traced once for all tests."""
    model, batch = make(rows=rows)

    def trace(count):
        return fold(trace_with_loss(model, mean_loss, [rows_part(value, count, None) for value in batch]))

    return searching.ModelByBatchSize(rows, functools.cache(trace), None, False)


def every(make, ranks, limit, rows=8):
    """Return a search and all its candidates that fit, with each choice of layers to recompute."""
    search = searching._Search(traced(make, rows), ranks, limit, "910b", lambda text: None)
    fits = lambda each: search.evaluation.memory(each).total <= limit  # noqa: E731
    wholes = [replace(each, recompute_layers=()) for each in search._candidates()]
    return search, [each for whole in wholes for each in parts_of(search.evaluation, whole) if fits(each)]


def parts_of(evaluation, degrees):
    """Return degrees with every number of recomputed layers on each rank, and with all."""
    if degrees.recompute == "none":
        return [degrees]
    layers = [range(int(most)) for most in evaluation.stages(degrees).layers_of_ranks + 1]
    return [degrees, *(replace(degrees, recompute_layers=counts) for counts in itertools.product(*layers))]


def found(make, ranks, limit, rows=8):
    return searching.search_traced(traced(make, rows), ranks=ranks, memory=limit, hardware="910b")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "limit", "make"), [(4, 64e9, gpt), (8, 0.3e9, gpt), (6, 1e9, llama)])
def test_the_best_are_those_of_exhaustive_search(make, ranks, limit):
    best = found(make, ranks, limit, rows=24).best
    search, candidates = every(make, ranks, limit, rows=24)
    fastest, plain = {}, {each for each in candidates if each.recompute == "none"}
    for each in candidates:
        if each.recompute != "none" and replace(each, recompute="none", recompute_layers=()) in plain:
            continue  # recompute takes time, and it fits without
        key = replace(each, recompute_layers=())
        fastest[key] = min(fastest.get(key, inf), search.evaluation.breakdown(each).total)
    times = sorted(fastest.values())
    assert [each.seconds for each in best] == times[: len(best)]
    if limit < 1e9:
        assert any(each.degrees.recompute_layers and each.recomputed for each in best)
    assert len(best) == min(searching.BEST, len(times))
    for each in candidates:
        assert search.evaluation.bound(each) <= search.evaluation.breakdown(each).total * (1 + 1e-12), each
        assert search.evaluation.least_memory(each) <= search.evaluation.memory(each).total, each


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stages", "kind"), [(1, "layers"), (3, "layers+collectives"), (4, "layers")])
def test_some_layers_of_a_stage_cost_what_the_whole_plan_says(stages, kind):
    """The folded rows beside the plan of the whole graph with these modules by name; 4 stages cut 6 layers inside."""
    model, batch = llama(layers=6)
    graph = trace_with_loss(model, mean_loss, batch)
    folded, mesh = fold(graph), ProcessMesh([0, 1], ["tp"])
    few = work_of(folded, propagate(folded.graph, mesh, objective="time"), current_settings())
    sums = stage_sums(few, stages)
    for count in range(4):
        counts = np.arange(stages) % 2 + count
        named = FoldedGraph(graph, np.arange(len(few.sequence)), ranges(sums.recomputed(counts)), 6)
        whole = work_of(named, propagate(graph, mesh, objective="time"), current_settings()).kept
        whole = whole[kind] if named.layers else whole["none"]
        rows = sums.recompute(kind).rows(counts)
        places = np.split(np.arange(len(few.sequence)), sums.cuts[1:])
        assert rows.saved == pytest.approx([whole.saved[place].sum() for place in places])
        again = whole.again + whole.again_sent
        assert rows.again == pytest.approx([again[place].sum() for place in places])
        assert rows.inside == pytest.approx([whole.inside[place].max() for place in places])


@pytest.mark.slow
def test_bounds_leave_most_candidates_untimed():
    result = found(gpt, 8, 64e9, rows=24)
    assert result.timed < result.considered / 4, "a search that times everything is no search"


@pytest.mark.slow
def test_the_time_is_that_of_the_whole_plan_on_all_ranks():
    best = found(llama, 4, 64e9).best[0]
    search, candidates = every(llama, 4, 64e9)
    plain = [each for each in candidates if each.recompute == "none" and each.virtual_stages == 1]
    of_mesh = {(each.dp, each.tp, each.pp, each.zero_stage): each for each in reversed(plain)}
    assert {(each.dp, each.tp) for each in of_mesh.values()} >= {(4, 1), (2, 2), (1, 4), (1, 1)}
    assert {each.zero_stage for each in of_mesh.values()} == {0, 1, 2, 3}
    (model, batch), by_rows = llama(rows=8), TracedByRows()
    for each in of_mesh.values():
        whole = step_of_whole_plan(each.tables((), "910b", None), model, batch, trace_step=by_rows)
        assert search.evaluation.breakdown(each).total == pytest.approx(whole, rel=1e-5), each
        assert whole >= best.seconds * (1 - 1e-5), each


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dp", "cp", "tp", "pp", "sharing"),
    [
        (1, 4, 1, 1, ("gather", 2)),
        (2, 2, 1, 1, ("heads", 1)),
        (1, 2, 2, 1, ("heads", 1)),
        (1, 2, 1, 2, ("heads", 2)),
    ],
)
def test_ranks_that_share_sequences_cost_what_the_whole_plan_does(dp, cp, tp, pp, sharing):
    evaluation = searching._Search(traced(llama), 4, 64e9, "910b", lambda text: None).evaluation
    way, groups = sharing
    each = Degrees(dp=dp, cp=cp, cp_exchange=way, cp_groups=groups, tp=tp, pp=pp, rows=2, micro_batches=4 // dp)
    tables = each.tables((), "910b", None)
    assert (tables["mesh"]["cp"], tables["sequence_dim"]) == (cp, "cp")
    assert (tables["sequence_exchange"], tables["sequence_groups"]) == sharing
    model, batch = llama(rows=8)
    predicted, whole = evaluation.breakdown(each).total, step_of_whole_plan(tables, model, batch)
    if dp == 1:
        assert predicted == pytest.approx(whole, rel=1e-5)
    else:  # the whole plan sums slices over cp, between a reduce-scatter and an all-gather over dp
        assert whole * (1 - 1e-5) < predicted < 1.25 * whole


@pytest.mark.parametrize(
    ("make", "tp", "rows", "label"),
    [(llama, 4, 1, "4 (weights whole)"), (gpt, 8, 2, "8"), (llama, 4, 24, "4 (ZeRO-3-like)")],
)
def test_a_label_says_what_the_tensor_parallel_ranks_run(make, tp, rows, label):
    search = searching._Search(traced(make, 24), tp, 64e9, "910b", lambda text: None)
    degrees = Degrees(dp=1, tp=tp, pp=1, rows=rows, micro_batches=24 // rows)
    memory = search.evaluation.memory(degrees)
    candidate = searching.candidate_of(search.evaluation, degrees, memory)
    assert candidate.tensor == label and f"x tp {label} x pp 1" in str(candidate)
    model, _ = make()
    held = memory.parameters / sum(4 * parameter.numel() for parameter in model.parameters())
    assert (held > 0.5) == ("whole" in label) and held >= 0.9 / tp
    plan = search.evaluation.stages(degrees).work.plan
    sent = Counter()
    for each in plan.conversions:
        if each.ahead:
            sent[plan.graph.nodes[each.value.node].kind] += sum(step.nbytes for step in each.ahead.steps)
    assert (sent.pop("parameter", 0) > sent.total()) == ("ZeRO" in label)


def test_long_sequences_are_cut():
    """By default only sequences of 32768 tokens or more; a given cp is kept."""
    assert sequence_degrees(8, 32768, None) == (1, 2, 4, 8)
    assert sequence_degrees(8, 4096, None) == (1,)
    with pytest.raises(StrategyOptionError, match=r"cp=3: give a number that divides the 8 ranks and 4096 tokens"):
        sequence_degrees(8, 4096, 3)
    model, batch = llama(rows=4)
    best = search_degrees(model, batch, ranks=4, memory=64e9, hardware="910b", cp=2).best
    assert {each.degrees.cp for each in best} == {2}


def test_the_way_that_ranks_share_sequences_is_searched_too():
    """What is not given takes the least time, and stands in the strategy, which then has the same price."""
    model, batch = llama(layers=2, rows=1)
    job = {"ranks": 2, "memory": 64e9, "hardware": "910b", "cp": 2}
    result = search_degrees(model, batch, **job)
    best = result.best[0]
    assert best.degrees.cp_exchange in ("heads", "gather") and best.degrees.cp_groups
    assert f"cp 2 ({best.degrees.exchange_words})" in str(best)
    given = {
        (way, groups): search_degrees(model, batch, **job, cp_exchange=way, cp_groups=groups).best[0]
        for way in ("heads", "gather")
        for groups in (1, 2)
    }
    assert best.seconds == pytest.approx(min(each.seconds for each in given.values()))
    assert {each.degrees.cp_exchange for key, each in given.items() if key[0] == "gather"} == {"gather"}
    tables = result.tables()
    assert (tables["sequence_exchange"], tables["sequence_groups"]) == (
        best.degrees.cp_exchange,
        best.degrees.cp_groups,
    )
    for options, words in (
        ({"cp_exchange": "ring"}, "cp_exchange='ring': give one of heads, gather; a plan runs no ring"),
        ({"cp_groups": 0}, "cp_groups=0: give a whole number from 1 to 64"),
        ({"cp": 1, "cp_groups": 2}, "cp_groups=2: no ranks share a sequence"),
    ):
        with pytest.raises(StrategyOptionError, match=words):
            search_degrees(model, batch, **(job | options))


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [gpt, llama])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_folded_graph_costs_what_the_whole_costs(make, tp):
    model, batch = make(layers=7)
    graph = trace_with_loss(model, mean_loss, batch)
    folded = fold(graph)
    calls = sum(node.kind == "call" for node in graph.nodes.values())
    assert (folded.depth, folded.layers, len(folded.sequence)) == (7, ("layers.*",), calls)
    assert len(folded.graph.nodes) < len(graph.nodes) * 4 / 7
    whole = FoldedGraph(graph, np.arange(calls), folded.layers, 7)
    mesh = ProcessMesh(list(range(tp)), ["tp"])
    few, many = (
        work_of(each, propagate(each.graph, mesh, objective="time"), current_settings()) for each in (folded, whole)
    )
    for name in OF_OPERATORS:
        assert getattr(few, name)[few.sequence] == pytest.approx(getattr(many, name)), name
    for kind in few.kept:
        for name, numbers in vars(few.kept[kind]).items():
            assert numbers[few.sequence].sum() == pytest.approx(getattr(many.kept[kind], name).sum()), (kind, name)


def test_layers_that_differ_are_not_folded():
    model, batch = llama(layers=6)
    with torch.device("meta"):
        model.layers[3].mlp = type(model.layers[3].mlp)(512, 512)
    folded = fold(trace_with_loss(model, mean_loss, batch))
    assert folded.depth == 3  # layers 0 to 2
    assert len(folded.sequence) == sum(node.kind == "call" for node in folded.graph.nodes.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [gpt, llama])
def test_a_rescaled_graph_is_the_traced_one(make):
    sizes = []

    def trace(count):
        sizes.append(count)
        return traced(make, 24).trace(count)

    made = GraphFamily(trace).at(24)
    assert sizes == [2, 4, 8]
    there = trace(24)
    assert list(made.graph.nodes) == list(there.graph.nodes)
    for name, node in there.graph.nodes.items():
        assert made.graph.nodes[name].outputs == node.outputs
        if node.call is not None:
            assert made.graph.nodes[name].call.args == node.call.args
            assert made.graph.nodes[name].call.inputs == node.call.inputs


class OfManyRows(torch.nn.Module):
    """Runs another operator if it gets more than 4 rows."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return (y.relu() if x.shape[0] > 4 else y).square().mean()


def test_a_model_that_depends_on_its_rows_is_traced_at_each_size():
    model, sizes = OfManyRows(), []

    def trace(count):
        sizes.append(count)
        return fold(trace_with_loss(model, mean_loss, (torch.zeros(count, 8),)))

    graph = GraphFamily(trace).at(16).graph
    assert sizes == [2, 4, 8, 16]
    assert any("relu" in name for name in graph.nodes)
    with pytest.raises(UnevenError, match="other operators"):
        rescaled(trace(2).graph, trace(8).graph, LinearFit(2, 8, 16))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ranks", "name", "several"),
    [(ranks, *schedule) for i, schedule in enumerate(SCHEDULES) for ranks in ((2, 8), (3, 4))[i % 2]],
)
def test_a_timed_schedule_is_the_simulated_one(name, several, ranks):
    drawn = random.Random(ranks)
    for count in (1, 2, ranks, 3 * ranks, 21 * ranks, 40 * ranks, 39 * ranks + 1):
        try:
            check(name, ranks, ranks * several, count)
        except ValueError:
            continue
        forward = [drawn.uniform(0.8, 1.2) for _ in range(ranks * several)]
        backward = [drawn.uniform(1.6, 2.4) for _ in forward]
        measured = {("F", stage): time for stage, time in enumerate(forward)}
        measured |= {("B", stage): time for stage, time in enumerate(backward)}
        measured |= {(half, stage): time / 2 for half in "IW" for stage, time in enumerate(backward)}
        expected = simulate(name, ranks, len(forward), count, StageTimes(send=0.1, measured=measured))
        found = max(rank_ends(name, ranks, count, forward, backward, 0.1))
        few = count <= 64
        assert found == pytest.approx(expected.seconds, rel=1e-12 if few else 0.01), count
        assert live(name, ranks, len(forward), count) == expected.live


@pytest.mark.slow
def test_memory_is_kept_and_named_when_nothing_fits():
    ample = found(gpt, 4, 64e9)
    assert ample.too_large is None
    limit = ample.best[0].memory.total * 0.8
    tight = found(gpt, 4, limit)
    assert all(each.memory.total <= limit for each in tight.best)
    assert tight.best[0].seconds > ample.best[0].seconds
    assert tight.too_large.memory.total > limit
    search, candidates = every(gpt, 4, 64e9)
    least = min(search.evaluation.memory(each).total for each in candidates)
    assert found(gpt, 4, least * 1.000001).best[0].memory.total == pytest.approx(least)
    with pytest.raises(MemoryLimitError, match=r"memory=.*no degrees fit on 4 ranks\. The least is .* a rank, with dp"):
        found(gpt, 4, least * 0.999)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ranks": 0}, StrategyOptionError, "ranks=0: give a whole number"),
        ({"ranks": True}, StrategyOptionError, "ranks=True"),
        ({"memory": -1}, StrategyOptionError, "memory=-1: give the bytes"),
        ({"memory": "60GB"}, StrategyOptionError, "memory='60GB': give the bytes"),
        ({"hardware": "911b"}, PlanningError, "hardware '911b' is not known; did you mean"),
        ({"batch": torch.zeros(8, 512)}, TypeError, "batch is a Tensor: give the loss's arguments as a tuple"),
        ({"batch": (torch.zeros(8, 512), torch.zeros(4, 512))}, StrategyOptionError, "first dimension is the batch"),
        ({"batch": (torch.tensor(3),)}, StrategyOptionError, "first dimension is the batch"),
    ],
)
def test_bad_input_is_named(options, error, message):
    model, batch = gpt()
    options = {"batch": batch, "ranks": 4, "memory": 64e9} | options
    with pytest.raises(error, match=message):
        search_degrees(model, **options)


def test_a_model_that_places_itself_is_refused():
    for mark, message in (
        (lambda layer: shard(layer.up, [(1, 1, 1), ("tp", 1)]), r"layers\.1\.up has a strategy"),
        (lambda layer: setattr(layer, "pipeline_stage", 1), r"layers\.1 has a pipeline stage"),
        (recompute, r"layers\.1 is marked for recompute"),
    ):
        model, batch = gpt()
        mark(model.layers[1])
        with pytest.raises(StrategyOptionError, match=message):
            search_degrees(model, batch, ranks=4, memory=64e9)


@pytest.mark.slow
def test_a_strategy_is_found_in_one_call():
    model, batch = gpt()
    best = search_degrees(model, batch, ranks=4, memory=64e9, hardware="910b1").tables()
    strategy = Strategy.search(model, batch, ranks=4, memory=64e9, hardware="910b1")
    assert strategy == Strategy.from_dict(best)
    assert strategy.ranks == 4 and strategy.hardware == "910b1"


def test_what_is_recomputed_in_words_and_patterns():
    plain = Degrees(dp=1, tp=1, pp=2, rows=1, micro_batches=2, recompute="layers")
    words = {
        (): "layers",
        (2, 0): "layers: 0-2 a stage",
        (3, 3): "layers: 3 a stage",
        (0, 0): "layers: those that two stages share",
    }
    for counts, said in words.items():
        assert f"recompute {said}, ZeRO" in str(replace(plain, recompute_layers=counts))
    assert ranges(("layers.0", "layers.1", "layers.3", "other.4", "7", "8")) == (
        "layers.0-1",
        "layers.3",
        "other.4",
        "7-8",
    )
