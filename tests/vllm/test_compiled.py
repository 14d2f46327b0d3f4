"""Compiled models: a row layer is one operator of the graphs, and a cache made without this package is not taken."""

import re
import sys
from pathlib import Path

import pytest
from generate import saved_model

from ascend_parallel.patches.vllm.auto import WHOLE, MeasuredCounts, StepVariant, TimedSteps

LENGTHS = [600, 90]
RUNS = (1, 4, 4, "auto")  # the third has the cache of the second


def compiled(folder):
    """Return what compiled models generate without and with overlap, the compiled graphs after each, and the counts."""
    from generate import engine, generated
    from vllm import envs
    from vllm.model_executor.layers.linear import RowParallelLinear

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    found = []
    for count in RUNS:
        chunks = {"auto": True} if count == "auto" else {"num_chunks": count}
        ascend_parallel.configure(**chunks, frameworks=("vllm",))
        print(f"CHUNKS {count}", file=sys.stderr, flush=True)
        with engine("llama_of_one_layer", folder, enforce_eager=False) as llm:
            graphs = sorted(map(str, Path(envs.VLLM_CACHE_ROOT).glob("torch_compile_cache/*/*/rank_0_0")))
            COUNTS.clear()
            found.append([generated(llm, LENGTHS), graphs, COUNTS.as_dict()])
            if count == "auto":  # which way is the fastest depends on the machine
                for variant in (StepVariant(4), StepVariant(4, eager=True)):
                    COUNTS.clear()
                    with RowParallelLinear.forward.ascend_parallel.trying(variant):
                        found.append([generated(llm, LENGTHS), graphs, COUNTS.as_dict()])
                told = [told_of(llm, variant) for variant in (WHOLE, StepVariant(4, eager=True))]
                ascend_parallel.configure(num_chunks=1)
                found.append([generated(llm, LENGTHS), graphs, told])
    return found


def told_of(llm, variant):
    """Return what coverage tells of the model once auto has timed this way as the fastest."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    import ascend_parallel

    def told(model):
        timed = MeasuredCounts((TimedSteps(1536, {}, variant),), 0.0)
        RowParallelLinear.forward.ascend_parallel.may_leave_graphs(model, timed)
        return str(ascend_parallel.coverage(model))

    return llm.apply_model(told)[0]


@pytest.fixture(scope="module")
def results(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    saved_model("llama_of_one_layer", folder)
    return pair.call(compiled, folder)


@pytest.mark.promise("vllm-tokens")
def test_tokens_and_logprobs_are_those_of_vllm(results):
    (plain, _, before), (cold, _, _), (warm, _, _), *_ = results[0][0]
    assert not before
    assert cold == plain and warm == plain


def test_the_all_reduce_runs_in_chunks_inside_the_graph(results):
    for _, _, counts in results[0][0][1:3]:
        assert counts["matmul_all_reduce"] == {"calls": 2, "chunks": 10, "collectives": 10}  # 690 tokens, two layers


def test_a_cache_that_was_made_without_overlap_is_not_taken(results):
    before, cold, warm, *_ = (graphs for _, graphs, _ in results[0][0])
    assert len(before) == 1 and len(cold) == 2 and set(before) < set(cold)
    assert warm == cold


def test_the_log_says_what_is_covered_and_what_was_timed(results):
    without, cold, warm, auto = results[1].split("CHUNKS")[1:]
    covered = "vllm: compiled: overlap covers 2 of 2 row-parallel layers, "
    assert covered not in without
    assert all(log.count(f"{covered}each alone, as one operator of the graphs") == 1 for log in (cold, warm))
    assert auto.count(f"{covered}outside vLLM's own graphs alone, in steps of 256 tokens or more") == 1
    outside = r"in \d chunks outside the graphs"
    variant = rf"(whole \(\d+ ms; {outside} \d+\)|{outside} \(\d+ ms; whole \d+\))"
    assert re.search(rf"auto, timed in .* s: 1536 tokens {variant}, 384 tokens {variant}\n", auto)


def test_with_auto_the_graphs_are_those_of_vllm(results):
    (before, _, _), *_, (inside, _, of_inside), _, (plain, _, _) = results[0][0]
    assert inside == plain == before
    assert not of_inside  # operators would have been cut


def test_coverage_tells_whether_steps_leave_the_graphs(results):
    *_, (_, _, (whole, outside)) = results[0][0]
    assert whole.startswith("0 of 2 linear layers covered (2 RowParallelLinear: compiled: the original runs); ")
    assert outside.startswith("2 of 2 linear layers covered; ")


def test_a_step_outside_the_graphs_leaves_rows_unfinished_past_the_layers(results):
    *_, (outside, _, of_outside), (plain, _, _) = results[0][0]
    assert [each["tokens"] for each in outside] == [each["tokens"] for each in plain]
    assert of_outside["matmul_all_reduce"] == {"calls": 2, "chunks": 10, "collectives": 10}
    assert "all_reduce" in of_outside  # that of the embedding
    assert "region" in of_outside
