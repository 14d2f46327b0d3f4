"""Greedy tokens and logprobs on two ranks: with overlap those of vLLM as it is, for several families of models.

A pair of processes runs all, an engine after the other.
"""

import pytest
from generate import FAMILIES, saved_model
from ranks import on_two_ranks

LENGTHS = [1200, 600, 90]


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


def of_families(folder):
    from generate import engine

    results = {}
    for family in FAMILIES:
        with engine(family, folder) as llm:
            results[family] = beside_plain(llm)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        saved_model(family, folder)
    return on_two_ranks(of_families, folder)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_those_of_vllm(family, results):
    first, second = (each[family] for each in results)
    assert first["ours"] == first["plain"]
    assert first["ours"] == second["ours"]
    assert first["counts"]["region"]["chunks"] > 0
