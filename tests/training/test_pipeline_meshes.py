"""Stages on meshes of different shapes train as the whole model on one rank does: losses, norms, every parameter."""

from pathlib import Path

import gpt
import pytest
import stage_meshes
import torch
from decoders import check_step, decoder
from hf_decoders import strategy_of
from staged import STAGES, Crossing, crossing_batch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.consistency import DisagreementError
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training import (
    AmpOptions,
    OverlapOptions,
    PipelineOptions,
    Recompute,
    ShardingOptions,
    Strategy,
    StrategyOptionError,
    train_step,
)
from ascend_parallel.training.pipeline.pipeline import Pipeline
from ascend_parallel.training.pipeline.stage_assignment import StageError

COLUMNS, ROWS = ([("dp", 1, 1), ("tp", 1)], None), ([("dp", 1, "tp"), (1, "tp")], None)
MEGATRON = {"layers.*.qkv": COLUMNS, "layers.*.up": COLUMNS, "layers.*.o": ROWS, "layers.*.down": ROWS}
SQUARE, LINE, ACROSS = {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}
STEPS = 4


def pipeline(*meshes, **options):
    return PipelineOptions(**{"degree": len(meshes), "meshes": meshes, "micro_batches": 4, **options})


def semi_auto(*meshes, **options):
    pipelined = {name: options.pop(name) for name in ("schedule", "virtual_stages", "stages") if name in options}
    return {"mode": "semi_auto", "operators": MEGATRON, "pipeline": pipeline(*meshes, **pipelined), **options}


def check_state(step, whole):
    """Compare each shard that this rank holds with its place in the whole model."""
    state = whole.state_dict()
    shards = step.tensor_shards()
    for name, shard in shards.items():
        place = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))
        torch.testing.assert_close(shard.local.detach(), state[name][place], rtol=1e-8, atol=1e-10)
    return set(shards)


def train(_group, options, make, batch_of, steps=STEPS):
    """Train on one batch after another beside the whole model; return losses, norms, names of the rank's state."""
    torch.manual_seed(0)
    whole = make().double()
    strategy = Strategy(**{"max_norm": 0.05, **options})
    step = train_step(whole, batch_of(0), torch.optim.AdamW(whole.parameters(), lr=1e-2), strategy)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    found = []
    for number in range(steps):
        ours = step(*batch_of(number)).item()
        expected = whole(*batch_of(number))
        theirs.zero_grad()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), strategy.max_norm).item()
        theirs.step()
        found.append((ours, expected.item(), step.optimizer.norm, norm))
    names = check_state(step, whole)
    with torch.no_grad():
        expected = whole.eval()(*batch_of(9)).item()
    found.append((step.evaluate(*batch_of(9)).item(), expected, 1, 1))
    step.close()
    return found, names


def check(results, steps=STEPS):
    for found, names in results:
        assert len(found) == steps + 1
        assert names
        for ours, theirs, norm, expected in found:
            assert ours == pytest.approx(theirs, rel=1e-9)
            assert norm == pytest.approx(expected, rel=1e-9)


CASES = {
    "1f1b": semi_auto(SQUARE, LINE),
    "gpipe": semi_auto(LINE, SQUARE, schedule="gpipe"),
    "interleaved": semi_auto(SQUARE, ACROSS, schedule="interleaved_1f1b", virtual_stages=2),
    "zero bubble": semi_auto(
        SQUARE, LINE, schedule="zero_bubble", virtual_stages=2, overlap=OverlapOptions(operators=False)
    ),
    "zbv": semi_auto(ACROSS, LINE, schedule="zbv", virtual_stages=2, overlap=OverlapOptions(operators=False)),
    "recompute": semi_auto(SQUARE, LINE, recompute=Recompute(modules=["layers.*"])),
    "zero 1": semi_auto(SQUARE, LINE, sharding=ShardingOptions(zero_stage=1)),
    "zero 1 by parameters": semi_auto(SQUARE, LINE, sharding=ShardingOptions(zero_stage=1, partition_by="parameters")),
    "zero 2": semi_auto(LINE, SQUARE, sharding=ShardingOptions(zero_stage=2)),
    "zero 3": semi_auto(SQUARE, LINE, sharding=ShardingOptions(zero_stage=3)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_a_gpt_on_8_ranks(ranks, case):
    """The embedding is tied to the head, on the other mesh."""
    check(ranks(8).run(train, CASES[case], gpt.GPT, gpt.batch_of))


def crossed(number):
    return crossing_batch(48, torch.Generator().manual_seed(number))


def auto(*meshes, **options):
    return {"mode": "auto", "pipeline": pipeline(*meshes, stages=STAGES, **options)}


# Meshes that cut what crosses the stages in different ways, by the number of ranks; also uneven, on 3 ranks of a mesh.
SHAPES = {
    4: [({"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}, {"dp": 1, "tp": 1})],
    6: [
        ({"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}),
        ({"dp": 3, "tp": 1}, {"dp": 1, "tp": 1}, {"dp": 2, "tp": 1}),
        ({"dp": 1, "tp": 3}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}),
    ],
    8: [(LINE, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 1})],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("count", "meshes"), [(count, meshes) for count, some in SHAPES.items() for meshes in some])
def test_three_stages_of_different_shapes_and_numbers_of_ranks(ranks, count, meshes, schedule):
    """Several tensors between stages, one that skips a stage, a mask, a parameter that all stages share."""
    check(ranks(count).run(train, auto(*meshes, schedule=schedule), Crossing, crossed))


class Two(nn.Module):
    """Two layers, a stage each."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x, y):
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def rows_of(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(12, width, dtype=torch.float64, generator=generator) for width in (6, 4))


SMALL = {"mode": "auto", "pipeline": pipeline({"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}, micro_batches=3)}


def test_stages_of_two_ranks_and_of_one(ranks):
    check(ranks(3).run(train, SMALL, Two, rows_of))


def counted(model, x, y):
    """A sum and a count, which differs between micro-batches."""
    kept = x[:, 0] > 0
    return ((model.last(torch.tanh(model.first(x))) - y).square().sum(-1) * kept).sum(), kept.sum()


def own_parts(strategy, group, batch):
    """Return this rank's rows of each micro-batch, joined."""
    at, parts = strategy.data_rank(group.rank()), strategy.pipeline.micro_batches
    return tuple(torch.cat([part.chunk(2)[at] for part in tensor.chunk(parts)]) for tensor in batch)


def local(group, wrong):
    torch.manual_seed(0)
    meshes = {"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}
    whole, strategy = Two().double(), Strategy(pipeline=pipeline(*meshes, micro_batches=3))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    step = train_step(whole, rows_of(0), optimizer, strategy, loss=counted, local_batches=True)
    found = []
    for number in range(3):
        own = own_parts(strategy, group, rows_of(number + 7 * (group.rank() == wrong)))
        if wrong is not None:
            with pytest.raises(DisagreementError, match=r"ranks 0, 2, 3 are one replica|ranks 1, 4, 5 are one replica"):
                step(*own)
            continue
        ours = step(*own).item()
        total, count = counted(whole, *rows_of(number))
        whole.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.1 * parameter.grad
        found.append((ours, (total / count).item()))
    if wrong is None:
        check_state(step, whole)
    step.close()
    return found


def test_each_rank_gives_its_own_part_of_a_batch_and_the_loss_counts(ranks):
    for found in ranks(6).run(local, None):
        assert [ours for ours, _ in found] == pytest.approx([theirs for _, theirs in found], rel=1e-9)


@pytest.mark.parametrize("wrong", [0, 4])
def test_another_part_of_the_batch_on_another_mesh_is_seen(ranks, wrong):
    ranks(6).run(local, wrong)


CHECKPOINTS = {
    "mixed": semi_auto(SQUARE, LINE, sharding=ShardingOptions(zero_stage=1)),
    "other": semi_auto(LINE, ACROSS, sharding=ShardingOptions(zero_stage=2)),
    "three": semi_auto({"dp": 1, "tp": 2}, LINE, {"dp": 2, "tp": 1}),
    "equal": {
        "mode": "data",
        "mesh": {"dp": 4},
        "pipeline": PipelineOptions(degree=2, micro_batches=4),
        "sharding": ShardingOptions(zero_stage=3),
    },
}


def change(_group, first, second, folder):
    """Train 3 batches, save, load under another strategy, train 3 more; return the losses."""
    losses = []
    for options, start in ((first, 0), (second, 3)):
        torch.manual_seed(start)
        model = gpt.GPT().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = train_step(model, gpt.batch_of(0), optimizer, Strategy(**options))
        if start:
            assert step.load(folder) == {"told": 7}
        losses += [step(*gpt.batch_of(number)).item() for number in range(start, start + 3)]
        step.save(folder, {"told": 7})
        step.close()
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "second"), [("mixed", "other"), ("other", "equal"), ("equal", "three")])
def test_a_checkpoint_goes_on_under_other_meshes(ranks, tmp_path, first, second):
    """The embedding is tied to the head, and cut in different ways on the two meshes."""
    torch.manual_seed(0)
    model = gpt.GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for number in range(6):
        loss = model(*gpt.batch_of(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in ranks(8).run(change, CHECKPOINTS[first], CHECKPOINTS[second], str(tmp_path)):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


def wide_loss(model, x, y):
    return F.mse_loss(model.last(torch.tanh(model.first(x))).float(), y.float())


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
            next(step.modules[0].parameters()).grad.view(-1)[0] = float("inf")

    for number in range(3):
        step._runner.finish = poisoned if number == 1 else finish
        before = [parameter.clone() for module in step.modules for parameter in module.parameters()]
        loss = step(*batch).item()
        after = [parameter for module in step.modules for parameter in module.parameters()]
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


TIED = {"Llama": {"tie_word_embeddings": True}, "GPT2": {}}  # GPT-2's are tied by default


def decoded(_group, name, meshes):
    changes = TIED[name]
    operators = strategy_of(name, 2, 2, **changes).operators
    strategy = Strategy(operators=operators, pipeline=pipeline(*meshes, micro_batches=2))
    return check_step(name, strategy, changes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TIED)
def test_decoders_of_transformers(ranks, name):
    held = ranks(8).run(decoded, name, (SQUARE, LINE))
    assert set().union(*held) == set(dict(decoder(name, **TIED[name]).named_parameters()))


def example(_group):
    return stage_meshes.train(), stage_meshes.one_card()


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


def by_hand(group):
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
    return len(measured.seconds), 0 < measured.bubble < 1


def test_a_pipeline_by_hand(ranks):
    assert ranks(3).run(by_hand) == [(2, True)] * 3
