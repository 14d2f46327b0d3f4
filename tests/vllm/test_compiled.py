"""Compiled models: vLLM's own code runs inside graphs, and a cache that was made without this package is not taken."""

import sys
from pathlib import Path

import pytest
from generate import saved_model
from ranks import on_two_ranks

LENGTHS = [600, 90]
# vLLM traces, freezes and caches the model as by default; inductor would only take longer.
TRACED = {"backend": "eager"}


def compiled(folder):
    """Return what a compiled model generates without and then with overlap, and the compiled graphs after each."""
    from generate import engine, generated
    from vllm import envs

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    found = {}
    for count in (1, 4):
        ascend_parallel.configure(num_chunks=count, frameworks=("vllm",))
        COUNTS.clear()
        print(f"CHUNKS {count}", file=sys.stderr, flush=True)
        with engine("llama_of_one_layer", folder, enforce_eager=False, compilation_config=TRACED) as llm:
            graphs = sorted(map(str, Path(envs.VLLM_CACHE_ROOT).glob("torch_compile_cache/*/*/rank_0_0")))
            found[count] = [generated(llm, LENGTHS), graphs, COUNTS.as_dict()]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    saved_model("llama_of_one_layer", folder)
    return on_two_ranks(compiled, folder, VLLM_CACHE_ROOT=folder / "cache")


def test_a_cache_that_was_made_without_overlap_is_not_taken(results):
    (plain, before, _), (ours, after, counts) = results[0][0].values()
    assert len(before) == 1 and len(after) == 2 and set(before) < set(after)
    assert ours == plain
    assert not counts


def test_the_log_says_that_compiled_models_are_not_covered(results):
    without, with_overlap = results[1].split("CHUNKS 4", 1)
    assert "compiled: not covered" not in without
    assert with_overlap.count("vllm: compiled: not covered. vLLM compiles this model") == 1
