"""Greedy tokens and logprobs on two ranks: with overlap those of vLLM as it is, for several families of models.

A pair of processes runs several: to import vLLM takes longer than the rest.
"""

import pytest
from generate import saved_model
from ranks import on_two_ranks

LENGTHS = [1200, 600, 90]
# A pair of processes for each group: the engines of many models in one process wait for each other as they end.
GROUPS = (("llama", "qwen2", "qwen3"), ("gemma2", "opt"), ("mixtral", "qwen3_moe"))


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


def dense(folder):
    return of_families(folder, GROUPS[0])


def with_gelu(folder):
    return of_families(folder, GROUPS[1])


def with_experts(folder):
    return of_families(folder, GROUPS[2])


def of_families(folder, families):
    from generate import engine

    return {family: beside_plain(engine(family, folder)) for family in families}


@pytest.mark.promise("vllm-tokens")
@pytest.mark.parametrize("run", [dense, with_gelu, with_experts])
def test_tokens_and_logprobs_are_those_of_vllm(run, tmp_path):
    families = GROUPS[(dense, with_gelu, with_experts).index(run)]
    for family in families:
        saved_model(family, tmp_path)
    first, second = on_two_ranks(run, tmp_path)[0]
    for family in families:
        assert first[family]["ours"] == first[family]["plain"], family
        assert first[family]["ours"] == second[family]["ours"], family
        assert first[family]["counts"]["region"]["chunks"] > 0, family
