"""Greedy tokens and logprobs on two ranks: with overlap those of vLLM as it is, for several families of models.

An engine runs after the other.
"""

import os
import re
import sys

import pytest
from generate import FAMILIES, saved_model
from ranks import collected

LENGTHS = [1200, 600, 90]
# A norm before each layer, norms around it, experts, and a dtype in which kernels depend on the rows.
SHORT = ("llama", "gemma2", "qwen3_moe", "llama_bf16")


def beside_plain(family, folder, lengths=LENGTHS, **options):
    """Return the results of vLLM with overlap and as it is, and what was counted."""
    from generate import engine, generated

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    print(f"MODEL {family}", file=sys.stderr, flush=True)
    with engine(family, folder, **options) as llm:
        COUNTS.clear()
        results = {"ours": generated(llm, lengths), "counts": COUNTS.as_dict()}
        ascend_parallel.configure(num_chunks=1)
        results["plain"] = generated(llm, lengths)
    return results


def of_families(folder):
    return {family: beside_plain(family, folder) for family in os.environ["FAMILIES"].split(",")}


@pytest.fixture(scope="module")
def results(request, pair, tmp_path_factory):
    folder, families = tmp_path_factory.mktemp("families"), collected(request, "family", FAMILIES)
    for family in families:
        saved_model(family, folder)
    return pair.call(of_families, folder, FAMILIES=",".join(families))


def line_of(family, log):
    """Return what the log says about a model."""
    lines = log.partition(f"MODEL {family}\n")[2].partition("MODEL ")[0].splitlines()
    (line,) = (line for line in lines if "vllm: overlap covers" in line)
    return line


@pytest.mark.promise("vllm-tokens")
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in SHORT else pytest.mark.slow) for each in FAMILIES]
)
def test_tokens_and_logprobs_are_those_of_vllm(family, results):
    (first, second), log = results
    line, first, second = line_of(family, log), first[family], second[family]
    assert first["ours"] == second["ours"]
    assert first["counts"]["region"]["chunks"] > 0
    asked, kept = (int(number) for number in re.search(r"s: (\d+) of (\d+) matmuls keep their bits", line).groups())
    if asked == kept:  # where the machine's kernels depend on the rows, as another batch does
        assert first["ours"] == first["plain"]
    else:
        assert "depend on the rows" in line
