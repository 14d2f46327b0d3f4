"""The explanation of a strategy: each option's effect, without processes."""

import html
import json
import re
from dataclasses import replace

import gpt
import pytest
import torch
from marks import promise
from mesh_stages import MEGATRON, SQUARE

from ascend_parallel import Settings
from ascend_parallel.sharding import explain as explain_plan
from ascend_parallel.sharding import to_html
from ascend_parallel.sharding.planner.propagate import MemoryLimitError
from ascend_parallel.text import equal_runs, size_of
from ascend_parallel.training import (
    AmpOptions,
    CommFusion,
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    Recompute,
    ShardingOptions,
    Strategy,
    confirm_degrees,
    explain,
    plan_training,
)
from ascend_parallel.training.confirm_degrees import planned_whole
from ascend_parallel.training.degrees.search import Candidate, SearchResult, search_degrees
from ascend_parallel.training.degrees.space import SCHEDULES, Degrees
from ascend_parallel.training.explain import as_dict, fullest_rank
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.tuning.step_time.schedule import order

BASE = {"mesh": SQUARE, "operators": MEGATRON, "hardware": "cpu-gloo"}


def planned(**options):
    return plan_training(Strategy(**BASE, **options), gpt.GPT(), gpt.batch_of(0))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "mode: auto, 4 ranks, a mesh of dp=2, tp=2"),
        ({}, r"overlap: (\d+) of \1 matmuls next to a collective can overlap; 1 chunk: off"),
        ({}, r"comm_fusion: \d+ gradients, \S+ KB, are summed in \d buckets under backward"),
        ({"comm_fusion": CommFusion(bucket_mb=0)}, r"comm_fusion: (\d+) gradients, \S+ KB, are summed in \1 buckets"),
        ({"overlap": OverlapOptions(gradients=False)}, "after backward"),
        ({"pipeline": PipelineOptions(micro_batches=4)}, "pipeline: none; the gradients of 4 micro-batches"),
        (
            {"pipeline": PipelineOptions(degree=2, micro_batches=4)},
            r"2 stages on 2 groups of ranks; 1f1b, 4 micro-batches: bubble 20.0 % of a step \(20.0 % by the formula\)",
        ),
        ({"pipeline": PipelineOptions(degree=2, micro_batches=4)}, r"stage 0 sends 4.1 KB a rank and micro-batch"),
        ({"recompute": Recompute(modules=["layers.*"])}, r"recompute: layers.*: \S+ KB kept for backward"),
        ({"sharding": ShardingOptions(zero_stage=2)}, "sharding: ZeRO stage 2 over dp by slices: "),
        ({"max_norm": 0.5}, "max_norm: gradients are clipped to a global norm of 0.5"),
        ({"amp": AmpOptions(dtype="bfloat16")}, "amp: bfloat16, fp32 master weights"),
        (
            {"gradient_merge": GradientMerge(steps=4)},
            "gradient_merge: a step of the optimizer with the mean of 4 batches",
        ),
    ],
)
def test_an_option_says_what_it_does(options, message):
    assert re.search(message, explain(planned(**options)))


def test_equal_stages_in_a_row_are_told_once():
    assert equal_runs(["a", "b", "b", "b", "b", "c", "c"]) == [("0", "a"), ("1 to 4", "b"), ("5", "c"), ("6", "c")]
    stages = {f"layers.{layer}": layer for layer in range(6)}
    deep = Strategy(**BASE, pipeline=PipelineOptions(degree=6, micro_batches=4, schedule="gpipe", stages=stages))
    lines = explain(plan_training(deep, gpt.GPT(layers=6), gpt.batch_of(0))).splitlines()
    (sends,) = [line for line in lines if " send" in line]
    assert re.fullmatch(
        r"pipeline: stages 0 to 4 each send \S+ KB a rank and micro-batch, and receive as much back", sends
    )
    table = lines[lines.index("") + 1 :]
    table = table[: table.index("")]
    assert [line.split("  ")[0] for line in table] == ["stage", "0", "1 to 4", "5"]
    assert len({len(line) for line in table}) == 1


@promise("strategy-report")
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(num_chunks=4), "can overlap; 4 chunks (COC_PARALLEL_NUM=4)"),
        (Settings(num_chunks=4, mode=1), "can overlap; 1 chunk: off (COC_MODE=1)"),
        (
            Settings(auto=True),
            "can overlap; the chunks that a model and measurements find best (COC_PARALLEL_NUM=auto)",
        ),
        (Settings(fused=True), "can overlap; fused operators where they can run, else 4 chunks"),
    ],
)
def test_what_runs_is_said_and_not_what_could(settings, message):
    assert message in explain(planned(), settings=settings)


def large(layers, **options):
    """Plan a GPT with layers of real size on the meta device."""
    with torch.device("meta"):
        model = gpt.GPT(layers=layers, width=4096, heads=32, vocabulary=32768)
        tokens = torch.zeros(2, gpt.LENGTH, dtype=torch.long)
    return plan_training(Strategy(mode="data", **options), model, (tokens, tokens))


@promise("strategy-report")
@pytest.mark.slow
def test_a_plan_that_no_card_holds_is_warned_of():
    found = large(32, mesh={"dp": 2})
    message = "a rank holds 105 GB, and Ascend 910B2, 8 cards of an Atlas A2 has 68.7 GB a card: shard more"
    assert f"warning: {message}" in explain(found)
    assert f"warning: {message}"[:22] in explain_plan(found.plan)
    assert message in as_dict(found)["warnings"][0]
    for fitting in (large(2, mesh={"dp": 2}), large(32, mesh={"dp": 2}, hardware="cpu-gloo")):
        assert "warning" not in explain(fitting)


@promise("strategy-report")
@pytest.mark.slow
def test_a_plan_in_which_ranks_repeat_the_same_work_says_so():
    model, batch = gpt.GPT(), gpt.batch_of(0)
    all_alike = plan_training(Strategy(mode="data", mesh={"dp": 3}), model, batch)
    assert re.search(
        r"warning: each of the 3 ranks along dp repeats [78]\d % of the work: shard operators along dp",
        explain(all_alike),
    )
    assert "warning: each of the 3 ranks along dp repeats" in explain_plan(all_alike.plan)
    columns = {"layers.*.up": ([("dp", 1, 1), None], None)}
    alike = plan_training(Strategy(mode="semi_auto", mesh={"dp": 2, "tp": 2}, operators=columns), model, batch)
    assert "warning: each of the 2 ranks along tp repeats all of the work: shard operators along tp" in explain(alike)
    assert "warning" not in explain(planned())


def test_no_overlap_says_nothing_of_it():
    assert "overlap:" not in explain(planned(overlap=OverlapOptions(operators=False)))


@pytest.mark.slow
def test_gradients_of_several_backwards_take_fp32():
    plans = {}
    for count in (1, 2):
        options = {"amp": AmpOptions(dtype="bfloat16"), "pipeline": PipelineOptions(micro_batches=count)}
        plans[count] = planned(**options)
    (first,), (second,) = (as_dict(plans[count])["stages"] for count in (1, 2))
    assert (first["gradients"], second["gradients"]) == (first["parameters"], 2 * first["parameters"])
    assert "amp: gradients of 2 backwards add up, and are summed over ranks, in fp32" in explain(plans[2])
    assert "add up" not in explain(plans[1])


@pytest.mark.slow
def test_stages_hold_their_part_and_the_embedding_twice():
    whole = as_dict(planned())["stages"][0]["parameters"]
    stages = as_dict(planned(pipeline=PipelineOptions(degree=2, micro_batches=4)))["stages"]
    tied = gpt.VOCABULARY * 32 * 4
    assert sum(stage["parameters"] for stage in stages) == whole + tied


def test_the_plan_is_json_and_says_the_operators_if_asked():
    found = planned(pipeline=PipelineOptions(degree=2, micro_batches=4))
    assert json.loads(json.dumps(as_dict(found)))["bubble"] == pytest.approx(0.2)
    assert "layers.0.up linear" in explain(found, operators=True, full=True)
    assert "layers.0-3.up linear x4" in explain(found, operators=True)
    assert "layers.0.up linear" not in explain(found)


def test_a_rank_with_several_stages_holds_the_sum_of_them():
    """Of stages 0 and 2 on the first group, as many micro-batches of each are held as the schedule keeps at once."""
    options = PipelineOptions(degree=2, micro_batches=4, schedule="interleaved_1f1b", virtual_stages=2)
    deep = plan_training(Strategy(**BASE, pipeline=options), gpt.GPT(), gpt.batch_of(0))
    found = as_dict(deep)
    assert [group["stages"] for group in found["groups"]] == [("0", "2"), ("1", "3")]
    for group in found["groups"]:
        own = [stage for stage in found["stages"] if stage["stage"] in group["stages"]]
        assert group["parameters"] == sum(stage["parameters"] for stage in own)
        assert max(stage["activations"] for stage in own) < group["activations"]
        assert group["activations"] <= sum(stage["activations"] for stage in own)
    first = found["groups"][0]
    begin, middle = (stage["activations"] / most for stage, most in zip(found["stages"][::2], (4, 2), strict=True))
    assert first["activations"] == pytest.approx(max(4 * begin + middle, 3 * begin + 2 * middle))
    assert any(line.startswith("0, 2  ") for line in explain(deep).splitlines())


@pytest.mark.sample("zbv-2")
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_the_search_confirms_the_bytes_of_the_strategy(schedule, virtual_stages):
    """plan-training's last check keeps the rank that `strategy` shows as the fullest, counted here action by action."""
    degrees = Degrees(dp=1, tp=1, pp=2, rows=1, micro_batches=4, schedule=schedule, virtual_stages=virtual_stages)
    found = SearchResult(
        ranks=2,
        rows=4,
        limit=0.0,
        hardware="cpu-gloo",
        amp=None,
        layers=(),
        macs=1.0,
        tokens=0,
        itemsize=4,
        best=(Candidate(degrees, None, None),),
        too_large=None,
        considered=1,
        timed=1,
    )
    model, batch = gpt.GPT(), tuple(value[:4] for value in gpt.batch_of(0))
    planned = plan_training(Strategy.from_dict(degrees.tables((), "cpu-gloo", None)), model, batch)
    stages, actions = as_dict(planned)["stages"], order(schedule, 2, 2 * virtual_stages, 4)

    def most_live(actions, saved):
        """Return the most of a rank's sum of `saved`, of stages whose forward ran and whose last backward did not."""
        live, most = dict.fromkeys(saved, 0), 0.0
        for action in actions:
            live[action.stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            most = max(most, sum(live[stage] * size for stage, size in saved.items()))
        return most

    totals = []
    for rank_actions in actions:
        own = sorted({action.stage for action in rank_actions})
        counts = {stage: most_live([each for each in rank_actions if each.stage == stage], {stage: 1}) for stage in own}
        saved = {stage: stages[stage]["activations"] / counts[stage] for stage in own}
        held = sum(stages[stage][name] for stage in own for name in ("parameters", "gradients", "optimizer"))
        totals.append(held + most_live(rank_actions, saved))
    assert fullest_rank(planned).total == pytest.approx(max(totals))
    confirmed = planned_whole(replace(found, limit=max(totals) * 1.001), model, batch, mean_loss)
    assert confirmed.memory == pytest.approx(max(totals))
    with pytest.raises(MemoryLimitError):
        planned_whole(replace(found, limit=max(totals) * 0.999), model, batch, mean_loss)


def test_candidates_whose_micro_batches_have_the_same_rows_share_a_trace(monkeypatch):
    model, batch = gpt.GPT(), gpt.batch_of(0)
    found, traced = search_degrees(model, batch, ranks=4, memory=64e9, hardware="cpu-gloo"), []

    def trace(model, loss, part):
        traced.append(len(part[0]))
        return trace_with_loss(model, loss, part)

    monkeypatch.setattr(confirm_degrees, "trace_with_loss", trace)
    rows = [len(batch[0]) // each.degrees.micro_batches for each in found.best]
    with pytest.raises(MemoryLimitError, match=f"the whole plans of the {len(rows)} best"):
        planned_whole(replace(found, limit=0), model, batch, mean_loss)
    assert len(set(rows)) < len(rows)
    assert sorted(traced) == sorted(set(rows))


def test_page_and_text_of_a_strategy_give_the_same_bytes():
    found = planned(pipeline=PipelineOptions(degree=2, micro_batches=4), recompute=Recompute(modules=["layers.*"]))
    activations = size_of(fullest_rank(found).activations)
    assert activations != size_of(found.plan.memory().activations)
    page = html.unescape(to_html(found.plan, held=fullest_rank(found)))
    for text in (page, explain(found, operators=True)):
        assert set(re.findall(r"activations ([\d.]+ \w*B)", text)) == {activations}
    assert activations in explain(found).partition("\n\n")[2]
