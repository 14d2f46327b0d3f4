"""Greedy tokens and logprobs on two ranks: with overlap those of vLLM as it is, for several families of models.

One pair of processes runs all: to import vLLM takes longer than the rest.
"""

import pytest
from generate import saved_model
from ranks import on_two_ranks

LENGTHS = [1200, 600, 90]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "opt", "mixtral", "qwen3_moe")


def beside_plain(llm, lengths=LENGTHS, **options):
    """Return the results of vLLM as it is and with overlap, and what was counted."""
    from generate import generated

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    results = {"plain": generated(llm, lengths, **options)}
    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    COUNTS.clear()
    results["ours"], results["counts"] = generated(llm, lengths, **options), COUNTS.as_dict()
    ascend_parallel.configure(num_chunks=1)
    return results


def families(folder):
    from generate import engine

    return {family: beside_plain(engine(family, folder)) for family in FAMILIES}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        saved_model(family, folder)
    return on_two_ranks(families, folder)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_those_of_vllm(results, family):
    first, second = (rank[family] for rank in results)
    assert first["ours"] == first["plain"] and first["ours"] == second["ours"]
    assert first["counts"]["region"]["chunks"] > 0
