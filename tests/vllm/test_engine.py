"""vLLM's own processes, its caches of compiled graphs, and what is left to vLLM."""

import json
import sys
from pathlib import Path

import pytest
from generate import saved_model
from ranks import LIMIT, ended, environment, on_two_ranks, started

GENERATE = Path(__file__).with_name("generate.py")
LENGTHS = [600, 90]


def served(folder, options, **variables):
    """Return what a program gets from vLLM, which starts its own workers, and the log."""
    given = {"family": "llama", "folder": str(folder), "prompts": LENGTHS, **options}
    log = Path(folder) / "served.log"
    with log.open("w") as file:
        env = environment(**{"VLLM_CPU_OMP_THREADS_BIND": "0|1", **variables})
        codes = ended([started([sys.executable, str(GENERATE), json.dumps(given)], env, file)], LIMIT)
    text = log.read_text()
    lines = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
    assert lines, f"exit code {codes}\n{text[-4000:]}"
    return json.loads(lines[0]), text


def in_one_process(folder):
    """Return results of vLLM as it is, with overlap, in chunks alone, with prefix caching and chunked prefill."""
    from generate import engine, generated
    from vllm import envs

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    found = {}

    def twice(lengths):
        llm.reset_prefix_cache()
        return [generated(llm, lengths), generated(llm, lengths)]  # the second from the cache

    def beside(name, lengths):
        ascend_parallel.configure(num_chunks=1)
        plain = twice(lengths)
        ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
        COUNTS.clear()
        found[name] = [plain, twice(lengths), COUNTS.as_dict()]

    with engine("llama", folder, enable_prefix_caching=True, max_num_batched_tokens=512, max_model_len=1536) as llm:
        beside("chunked prefill, prefix caching", [1200, 600, 600])
        factors = [str(envs.compile_factors().get("ASCEND_PARALLEL"))]
        ascend_parallel.configure(num_chunks=2, frameworks=("vllm",))
        factors.append(str(envs.compile_factors().get("ASCEND_PARALLEL")))
        ascend_parallel.configure(num_chunks=4, region=False, frameworks=("vllm",))
        COUNTS.clear()
        found["chunks alone"] = [twice(LENGTHS)[0], COUNTS.as_dict()]
        ascend_parallel.configure(num_chunks=1)
        factors.append(envs.compile_factors().get("ASCEND_PARALLEL"))
        found["alone, plain"] = [twice(LENGTHS)[0]]
        found["factors"] = factors
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    saved_model("llama", folder)
    return folder, on_two_ranks(in_one_process, folder)[0][0]


def test_an_exported_variable_is_enough_in_every_worker(results):
    folder, found = results
    made, log = served(folder, {}, COC_PARALLEL_NUM=4)
    assert made == found["alone, plain"][0]
    assert log.count("vllm: overlap covers 4 of 4 row-parallel layers, in steps of 256 tokens or more") == 1


@pytest.mark.promise("vllm-features")
def test_chunked_prefill_and_prefix_caching(results):
    plain, ours, counts = results[1]["chunked prefill, prefix caching"]
    assert ours == plain and counts["region"]["chunks"] > 0


def test_chunks_inside_the_layers_alone(results):
    ours, counts = results[1]["chunks alone"]
    assert ours == results[1]["alone, plain"][0]
    assert counts["matmul_all_reduce"]["chunks"] > 0 and "region" not in counts


def test_caches_of_compiled_graphs_know_version_and_settings(results):
    with_four, with_two, without = results[1]["factors"]
    assert with_four != with_two and without is None
