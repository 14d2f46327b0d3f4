"""The search for degrees of models with experts: against whole plans, exhaustive search, and training."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from allocations import most_bytes_of_a_step
from brute_force_degrees import step_of_whole_plan
from marks import promise
from one_card import losses_of

from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.training import Strategy, StrategyOptionError, train_step
from ascend_parallel.training.degrees import search as searching
from ascend_parallel.training.degrees.evaluation import Evaluation
from ascend_parallel.training.degrees.folding import FoldedGraph
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.presets import built_preset, traced_preset
from ascend_parallel.training.degrees.space import Degrees, expert_degrees
from ascend_parallel.training.degrees.transformer import Transformer
from ascend_parallel.training.degrees.work import work_of
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.cost_model.models import Model

MIXTURE = Model(
    name="mixture",
    title="",
    source="",
    layers=4,
    hidden=256,
    ffn=512,
    heads=4,
    vocab=512,
    gated=True,
    experts=8,
    top_k=2,
    expert_ffn=256,
    shared_ffn=128,
    dense_layers=1,
)
HARDWARE, LENGTH, ROWS, LIMIT = "cpu-gloo", 64, 8, 1e12
MESHES = [(1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2)]


@functools.cache
def traced():
    """Return the model for searches, traced once for all tests."""
    made = traced_preset(MIXTURE, LENGTH, ROWS, "float32")
    return replace(made, trace=functools.cache(made.trace))


def evaluation(settings=None):
    hardware = find_hardware(HARDWARE)
    return Evaluation(hardware, Planner(traced().trace, hardware, settings or current_settings()), masters=False)


def degrees_of(dp, ep, tp, pp, **options):
    rows = ROWS // dp // (2 if pp > 1 else 1)
    return Degrees(dp=dp, ep=ep, tp=tp, pp=pp, rows=rows, micro_batches=ROWS // dp // rows, **options)


@promise("degrees-experts")
@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_time_is_that_of_the_whole_plan_on_all_ranks(mesh):
    degrees = degrees_of(*mesh)
    whole = step_of_whole_plan(degrees.tables((), HARDWARE, None), *built_preset(MIXTURE, LENGTH, ROWS))
    assert evaluation().breakdown(degrees).total == pytest.approx(whole, rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_holds_its_experts_and_the_rest_whole(zero):
    """Counted matrix by matrix: of 8 experts a rank has 8 / ep; ZeRO divides over dp what is left."""
    h, layers = MIXTURE.hidden, MIXTURE.layers
    around = layers * (4 * h * h + 2 * h) + 3 * h * MIXTURE.ffn + h + 2 * 512 * h
    around += 3 * (8 * h + 3 * h * MIXTURE.shared_ffn)
    experts = 3 * 3 * 8 * h * MIXTURE.expert_ffn
    memory = evaluation().memory(degrees_of(2, 2, 1, 1, zero_stage=zero))
    of_states = (around + experts / 2) * 4
    assert memory.optimizer == pytest.approx(2 * of_states / (2 if zero else 1))
    assert memory.parameters == pytest.approx(of_states / (2 if zero == 3 else 1))


def test_groups_hide_a_part_of_the_all_to_alls():
    """More groups shorten the collectives of a step on a slow network, and nothing else."""
    hardware = find_hardware("910b")
    model = replace(MIXTURE, hidden=1024, heads=8, head_dim=128, value_dim=128, expert_ffn=1024, dense_layers=0)
    made = traced_preset(model, 1024, 64, "bfloat16")
    trace = functools.cache(made.trace)
    degrees = Degrees(dp=1, ep=4, tp=1, pp=1, rows=64, micro_batches=1)
    parts = [
        Evaluation(hardware, Planner(trace, hardware, Settings(num_chunks=count)), masters=True).breakdown(degrees)
        for count in (1, 2)
    ]
    one, two = parts
    assert 0 < two.tensor < one.tensor
    assert (one.compute, one.optimizer) == (two.compute, two.optimizer)
    assert one.total - two.total == pytest.approx(one.tensor - two.tensor)


@promise("degrees-experts")
@pytest.mark.slow  # that of models without experts is not
def test_the_best_are_those_of_exhaustive_search():
    found = searching.search_traced(traced(), ranks=4, memory=LIMIT, hardware=HARDWARE)
    search = searching._Search(traced(), 4, LIMIT, HARDWARE, lambda text: None)
    candidates = [each for each in search._candidates() if each.recompute == "none"]  # all fit without recompute
    assert {(each.dp, each.ep, each.tp, each.pp) for each in candidates} >= {*MESHES, (4, 1, 1, 1), (1, 1, 4, 1)}
    assert all(each.rows % each.ep == 0 for each in candidates)
    times = sorted(search.evaluation.breakdown(each).total for each in candidates)
    assert [each.seconds for each in found.best] == times[: len(found.best)]
    for each in candidates:
        assert search.evaluation.bound(each) <= search.evaluation.breakdown(each).total * (1 + 1e-12), each
        assert search.evaluation.least_memory(each) <= search.evaluation.memory(each).total, each
    given = searching.search_traced(traced(), ranks=4, memory=LIMIT, hardware=HARDWARE, ep=2)
    assert {each.degrees.ep for each in given.best} == {2}
    assert given.best[0].seconds == min(search.evaluation.breakdown(each).total for each in candidates if each.ep == 2)


def test_degrees_of_experts_divide_ranks_and_experts():
    assert expert_degrees(12, 8, None) == (1, 2, 4)
    assert expert_degrees(12, 0, None) == (1,)
    with pytest.raises(StrategyOptionError, match=r"ep=3: 12 ranks, and layers with 8 experts .* one of 1, 2, 4"):
        expert_degrees(12, 8, 3)
    with pytest.raises(StrategyOptionError, match=r"ep=2: 4 ranks, and layers with 0 experts .*; give one of 1"):
        expert_degrees(4, 0, 2)


def test_a_folded_graph_with_dense_layers_first_costs_what_the_whole_costs():
    """Six layers with experts behind a dense one: three of them are traced, and four operators' lists repeat."""
    deep = replace(MIXTURE, layers=7)
    few = traced_preset(deep, LENGTH, ROWS, "float32").trace(ROWS)
    model, batch = built_preset(deep, LENGTH, ROWS)
    graph = trace_with_loss(model, mean_loss, batch)
    calls = sum(node.kind == "call" for node in graph.nodes.values())
    assert (few.depth, len(few.sequence)) == (6, calls)
    whole = FoldedGraph(graph, np.arange(calls), few.layers, 7)
    mesh = ProcessMesh([0, 1], ["ep"])
    short, long = (
        work_of(each, propagate(each.graph, mesh, objective="time", expert_dim="ep"), current_settings())
        for each in (few, whole)
    )
    for name in ("forward", "backward", "forward_sent", "backward_sent", "touched"):
        assert getattr(short, name)[short.sequence] == pytest.approx(getattr(long, name)), name
    for kind in short.kept:
        for name, numbers in vars(short.kept[kind]).items():
            assert numbers[short.sequence].sum() == pytest.approx(getattr(long.kept[kind], name).sum()), (kind, name)


def model_and_batch():
    torch.manual_seed(0)
    model = Transformer(MIXTURE, LENGTH).double()
    tokens = torch.randint(MIXTURE.vocab, (ROWS, LENGTH + 1))
    return model, (tokens[:, :-1], tokens[:, 1:])


def trained(group, tables):
    """Train two steps by the strategy of degrees; return the losses, and the bytes of this rank's parameters."""
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = train_step(model, batch, optimizer, Strategy.from_dict(tables))
    losses = [step(*batch).item() for _ in range(2)]
    held = sum(p.numel() * p.element_size() for module in step._runner.modules for p in module.parameters())
    step.close()
    return losses, held


@promise("degrees-experts")
@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_degrees_train_as_one_card_does(ranks, mesh):
    model, batch = model_and_batch()
    expected = losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2), [batch] * 2)
    degrees = degrees_of(*mesh)
    found = ranks(4).run(trained, degrees.tables(("layers.*",), HARDWARE, None))
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-10)
    if degrees.tp == 1:  # twice as wide as the search's float32; layouts over tp may depend on the dtype
        assert max(held for _, held in found) == pytest.approx(2 * evaluation().memory(degrees).parameters, rel=1e-9)


def most_bytes(_group, tables):
    model, batch = model_and_batch()
    return most_bytes_of_a_step(model.float(), batch, tables)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": "layers"}, {"zero_stage": 1}], ids=str)
def test_a_step_holds_what_was_predicted(ranks, options):
    """The router is not balanced, so a rank may get more rows than predicted; weights and their states dominate."""
    degrees = degrees_of(2, 2, 1, 1, **options)
    memory = evaluation().memory(degrees)
    measured = max(ranks(4).run(most_bytes, degrees.tables(("layers.*",), HARDWARE, None)))
    buckets = 3 * memory.gradients
    assert 0.75 * (memory.total - buckets) < measured <= memory.total
