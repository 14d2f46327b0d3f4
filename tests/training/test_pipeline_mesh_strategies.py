"""Stages on meshes of different shapes: overflows, the example, TOML, refusals, by hand."""

from pathlib import Path

import pytest
import stage_meshes
import torch
from mesh_stages import LINE, SMALL, SQUARE, Two, pipeline, rows_of
from pool import on_ranks
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training import (
    AmpOptions,
    Strategy,
    StrategyOptionError,
    train_step,
)
from ascend_parallel.training.pipeline.pipeline import Pipeline
from ascend_parallel.training.pipeline.stage_assignment import StageError


def wide_loss(model, x, y):
    return F.mse_loss(model.last(torch.tanh(model.first(x))).float(), y.float())


def parameters_of(step):
    return [parameter for module in step.modules for parameter in module.parameters()]


def overflow(group):
    """In the second step a gradient of the last mesh is infinite, on one rank."""
    torch.manual_seed(0)
    whole = Two()
    options = {**SMALL, "amp": AmpOptions(dtype="float16", master_grad=True)}
    batch = tuple(tensor.float() for tensor in rows_of(0))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    step = train_step(whole, batch, optimizer, Strategy(**options), loss=wide_loss)
    finish, found = step._runner.finish, []

    def poisoned():
        finish()
        if group.rank() == 2:
            parameters_of(step)[0].grad.view(-1)[0] = float("inf")

    for number in range(3):
        step._runner.finish = poisoned if number == 1 else finish
        before = [parameter.clone() for parameter in parameters_of(step)]
        loss = step(*batch).item()
        after = parameters_of(step)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((loss, step.optimizer.skipped, same, step.optimizer.loss_scale.scale))
    step.close()
    return found


def test_an_overflow_on_one_mesh_skips_the_step_on_all(ranks):
    results = ranks(3).run(overflow)
    for found in results:
        assert found == results[0]
        assert [skipped for _, skipped, _, _ in found] == [same for _, _, same, _ in found] == [False, True, False]
        assert found[1][3] == found[0][3] / 2
        assert found[1][0] == found[2][0]


def example(_group):
    return stage_meshes.train(), stage_meshes.one_card()


@pytest.mark.slow
def test_the_published_example(ranks):
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert f"```toml\n{stage_meshes.FILE.read_text(encoding='utf-8')}```" in page
    for losses, expected in ranks(8).run(example):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        assert expected[-1] < expected[0]


TOML = """
[pipeline]
degree = 2
meshes = [{ dp = 2, tp = 2 }, { dp = 4, tp = 1 }]
micro_batches = 4
"""


def test_meshes_in_toml_and_the_ranks_of_each(tmp_path):
    file = tmp_path / "strategy.toml"
    file.write_text(TOML)
    found = Strategy.from_toml(file)
    assert found == Strategy(pipeline=pipeline(SQUARE, LINE))
    assert found.mesh == SQUARE
    assert found.ranks == 8
    assert [(mesh.shape, mesh.process_ids) for mesh in found.meshes()] == [
        ((2, 2), [0, 1, 2, 3]),
        ((4, 1), [4, 5, 6, 7]),
    ]
    assert [found.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="rank=8: the strategy is for 8 ranks"):
        found.data_rank(8)
    uneven = Strategy(pipeline=pipeline({"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}))
    assert (uneven.ranks, [mesh.process_ids for mesh in uneven.meshes()]) == (3, [[0, 1], [2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": {"degree": 3, "meshes": [SQUARE, LINE], "micro_batches": 4}}, "2 meshes, and pipeline.degree=3"),
        ({"pipeline": {"meshes": [SQUARE, LINE]}}, "has 2 meshes, and pipeline.degree=1: give a mesh for each"),
        ({"pipeline": {"meshes": [SQUARE]}}, "pipeline.meshes with one mesh: give it as mesh"),
        ({"pipeline": {"degree": 2, "meshes": [SQUARE, {"dp": 4}], "micro_batches": 2}}, r"\[1\]={'dp': 4}: name the"),
        ({"pipeline": {"degree": 2, "meshes": [SQUARE, {"tp": 1, "dp": 4}], "micro_batches": 2}}, "in the same order"),
        ({"pipeline": {"degree": 2, "meshes": [SQUARE, {"dp": 0, "tp": 1}], "micro_batches": 2}}, r"\[1\]={'dp': 0"),
        (
            {"pipeline": {"degree": 2, "meshes": [SQUARE, {}], "micro_batches": 2}},
            r"meshes\[1\]={}: give sizes by name",
        ),
        ({"pipeline": {"degree": 2, "meshes": [SQUARE, 4], "micro_batches": 2}}, r"meshes\[1\]=4: give sizes by name"),
        ({"pipeline": {"degree": 2, "meshes": SQUARE, "micro_batches": 2}}, "give a list of meshes"),
        ({"pipeline": {"degree": 2, "mesh": [], "micro_batches": 2}}, "no 'mesh'; did you mean meshes"),
        ({"mesh": LINE, "pipeline": {"degree": 2, "meshes": [SQUARE, LINE], "micro_batches": 2}}, "leave mesh out"),
        ({"mode": "data", "pipeline": {"degree": 2, "meshes": [LINE, SQUARE], "micro_batches": 2}}, "dimension tp"),
        ({"mode": "hybrid", "pipeline": {"degree": 2, "meshes": [LINE, SQUARE], "micro_batches": 2}}, "with pipeline"),
        (
            {"data_dim": "data", "pipeline": {"degree": 2, "meshes": [LINE, SQUARE], "micro_batches": 2}},
            "data_dim='data': the mesh has dp, tp",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(StrategyOptionError, match=message):
        Strategy.from_dict(options)


def refused(_group, strategy, rows, local):
    model = Two().double()
    batch = tuple(tensor[:rows] for tensor in rows_of(0))
    try:
        train_step(model, batch, torch.optim.SGD(model.parameters(), lr=0.1), strategy, local_batches=local)
    except StrategyOptionError as error:
        return str(error)
    return ""


def test_ranks_refuse_alike(ranks):
    for strategy, rows, local, message in [
        (Strategy(**SMALL), 9, False, "pipeline.meshes[0]={'dp': 2, 'tp': 1}: a micro-batch has 3 rows ([9, 6] in "),
        (
            Strategy(**SMALL),
            12,
            True,
            "local_batches=True with pipeline.meshes dp=2, tp=1; dp=1, tp=1: a batch is cut into ",
        ),
        (
            Strategy(pipeline=pipeline(SQUARE, LINE)),
            12,
            False,
            "is for 8 ranks (pipeline.meshes dp=2, tp=2; dp=4, tp=1), and",
        ),
    ]:
        (error,) = set(ranks(3).run(refused, strategy, rows, local))
        assert message in error


@on_ranks(3)
def test_a_pipeline_by_hand(group):
    """The pipeline without a strategy: a plan for each mesh, two steps that add up, the times of a step."""
    torch.manual_seed(0)
    whole = Two().double()
    meshes = [ProcessMesh([[0], [1]], ["dp", "tp"]), ProcessMesh([[2]], ["dp", "tp"])]
    graph = trace(whole, tuple(tensor[:4] for tensor in rows_of(0)))
    plans = [
        propagate(graph, mesh, objective="time", data_dim="dp" if mesh.size("dp") > 1 else None) for mesh in meshes
    ]
    with pytest.raises(StageError, match="the mesh of stage 1 is dp=1, tp=1, the plan's is dp=2, tp=1: give a mesh of"):
        Pipeline(whole, plans[0], {"first": 0, "last": 1}, meshes, micro_batches=3)
    with pytest.raises(StageError, match="1 plans for 2 meshes"):
        Pipeline(whole, plans[:1], {"first": 0, "last": 1}, meshes, micro_batches=3)
    other = trace(nn.Sequential(whole.first, whole.last), (rows_of(0)[0][:4],))
    with pytest.raises(StageError, match="the plan of stage 1 is of another graph"):
        Pipeline(whole, [plans[0], propagate(other, meshes[1])], {"first": 0, "last": 1}, meshes, micro_batches=3)
    pipe = Pipeline(whole, plans, {"first": 0, "last": 1}, meshes, micro_batches=3, local_inputs=False)
    for number in range(2):
        assert pipe.step(*rows_of(number)).item() == pytest.approx(whole(*rows_of(number)).item(), rel=1e-12)
        whole(*rows_of(number)).backward()
    pipe.reduce_gradients()
    for module in pipe.modules:
        for name, gradient in module.full_gradients().items():
            torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    pipe.zero_grad()
    measured = pipe.measure(*rows_of(0))
    assert len(measured.seconds) == 2
    assert 0 < measured.bubble < 1
