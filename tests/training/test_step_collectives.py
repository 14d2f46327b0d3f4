"""The table of a step's collectives, beside what torch's profiler counts in a real step of four micro-batches."""

import html
from collections import Counter

import gpt
import pytest
import torch
from mesh_stages import MEGATRON, SQUARE
from torch.profiler import ProfilerActivity, profile

import ascend_parallel
from ascend_parallel.training import (
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    Recompute,
    ShardingOptions,
    Strategy,
    explain,
    plan_training,
    train_step,
)
from ascend_parallel.training.explain import Explanation, as_dict

FOUR = PipelineOptions(micro_batches=4)
MESH = {"mode": "semi_auto", "mesh": SQUARE, "operators": MEGATRON, "pipeline": FOUR}
APART = MESH | {"overlap": OverlapOptions(operators=False)}
RECOMPUTED = Recompute(modules=["layers.*"])
CASES = {
    "data": {"mode": "data", "mesh": {"dp": 4}, "pipeline": FOUR},
    "overlapped matmuls": MESH,
    "ZeRO 2, norm": APART | {"sharding": ShardingOptions(zero_stage=2), "max_norm": 1.0},
    "ZeRO 3, recompute": APART | {"sharding": ShardingOptions(zero_stage=3), "recompute": RECOMPUTED},
    "sums after backward": APART | {"overlap": OverlapOptions(operators=False, gradients=False)},
    "merged batches": APART | {"pipeline": PipelineOptions(), "gradient_merge": GradientMerge(steps=4)},
    "ZeRO 1": APART | {"sharding": ShardingOptions(zero_stage=1)},
    "ZeRO 1 by parameters": APART | {"sharding": ShardingOptions(zero_stage=1, partition_by="parameters")},
    "ZeRO 3": APART | {"sharding": ShardingOptions(zero_stage=3)},
    "recompute": APART | {"recompute": RECOMPUTED},
    "collectives again": APART | {"recompute": Recompute(modules=["layers.*"], collectives="recompute")},
    "auto": {"mode": "auto", "mesh": SQUARE, "pipeline": FOUR},
}
# What another case has beside something else.
RARE = ("recompute",)


def ran(_group, options):
    """Return how often each collective of gloo ran in a step of the optimizer; a reduce-scatter sends and receives."""
    torch.manual_seed(0)
    ascend_parallel.configure(num_chunks=1)  # whatever an earlier test in these processes has left
    strategy, model = Strategy(**options), gpt.GPT()
    step = train_step(model, gpt.batch_of(0), torch.optim.AdamW(model.parameters()), strategy, check_batches=0)
    merged = strategy.gradient_merge.steps
    for number in range(merged):
        step(*gpt.batch_of(number))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for number in range(merged):
            step(*gpt.batch_of(number))
    step.close()
    events = Counter(event.name for event in profiled.events())
    scattered = events["gloo:send"] + events["gloo:all_to_all"]
    counts = {kind: events[f"gloo:{kind}"] for kind in ("all_gather", "all_reduce", "broadcast")}
    return {kind: count for kind, count in (*counts.items(), ("reduce_scatter", scattered)) if count}


@pytest.mark.sample("data", "overlapped matmuls")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.stress) if case in RARE else case for case in CASES]
)
def test_the_table_counts_what_a_step_runs(ranks, case):
    counted = ranks(4).run(ran, CASES[case])
    found = as_dict(plan_training(Strategy(**CASES[case]), gpt.GPT(), gpt.batch_of(0)))["collectives"]
    assert counted == [found["step"]["counts"]] * 4
    for kind, count in found["step"]["counts"].items():
        parts = (found[name]["counts"].get(kind, 0) for name in ("micro_batch", "once"))
        assert count == sum(times * part for times, part in zip((4, 1), parts, strict=True))


def test_text_page_and_json_have_one_table():
    planned = plan_training(Strategy(**CASES["data"]), gpt.GPT(), gpt.batch_of(0))
    explained = Explanation(planned)
    found = explained.collectives
    (heads, each, once, step) = found.table()
    assert heads == ("collectives", "all_gather", "all_reduce", "sent by a rank", "ms")
    # The loss of a micro-batch is gathered and summed; the gradients are summed once, in a bucket.
    assert (each[:3], once[:3]) == (("each micro-batch", "1", "1"), ("once in a step", "0", "1"))
    assert step[:3] == ("a step of 4 micro-batches", "4", "5")
    lines = [" ".join(line.split()) for line in explain(planned).splitlines()]
    page = html.unescape(explained.html())
    for row in (heads, each, once, step):
        assert " ".join(row) in lines
    for cell in (*each, *once, *step):
        assert f">{cell}</td>" in page
    assert "collectives of a step" not in page and "collectives of a step" not in explain(planned)
    assert "once a step, in buckets" in page
    assert as_dict(planned)["collectives"]["step"]["bytes"] == pytest.approx(
        4 * found.micro_batch.nbytes + found.once.nbytes
    )
