"""vLLM's own processes, its caches of compiled graphs, and what happens to a running engine."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from generate import saved_model
from ranks import LIMIT, ended, environment, started
from vllm.distributed.device_communicators import cpu_communicator

from ascend_parallel.patches.vllm.layers import Vllm
from ascend_parallel.settings import Settings

GENERATE = Path(__file__).with_name("generate.py")
LENGTHS = [600, 90]


def served(folder, options, **variables):
    """Return what a program gets from vLLM, which starts its own workers, and the log."""
    given = {"family": "llama", "folder": str(folder), "prompts": LENGTHS, **options}
    log = Path(folder) / "served.log"
    with log.open("w") as file:
        env = environment(VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_ALLOW_INSECURE_SERIALIZATION=1, **variables)
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
        # What vLLM replaces is in the next call: nothing of a weight is kept here.
        llm.collective_rpc("reload_weights", kwargs={"weights_path": saved_model("llama_drawn_anew", folder)})
        beside("other weights", LENGTHS)
    return found


@pytest.fixture(scope="module")
def results(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    for family in ("llama", "llama_drawn_anew"):
        saved_model(family, folder)
    return pair.call(in_one_process, folder)[0][0]


def test_an_exported_variable_is_enough_in_every_worker(tmp_path):
    saved_model("llama", tmp_path)
    made, log = served(tmp_path, {}, COC_PARALLEL_NUM=4)
    asked, kept = re.search(r"s: (\d+) of (\d+) matmuls keep their bits", log).groups()
    if asked == kept:
        assert made["ours"] == made["plain"]
    assert [each["tokens"] for each in made["ours"]] == [each["tokens"] for each in made["plain"]]
    assert log.count("vllm: overlap covers 4 of 4 row-parallel layers, in steps of 256 tokens or more") == 1


@pytest.mark.promise("vllm-features")
def test_chunked_prefill_and_prefix_caching(results):
    plain, ours, counts = results["chunked prefill, prefix caching"]
    assert ours == plain and counts["region"]["chunks"] > 0


@pytest.mark.promise("vllm-features")
def test_weights_that_are_replaced_in_the_running_engine(results):
    plain, ours, counts = results["other weights"]
    assert ours == plain and counts["region"]["chunks"] > 0
    assert ours[0] != results["alone, plain"][0]


def test_chunks_inside_the_layers_alone(results):
    ours, counts = results["chunks alone"]
    assert ours == results["alone, plain"][0]
    assert counts["matmul_all_reduce"]["chunks"] > 0 and "region" not in counts


def test_caches_of_compiled_graphs_know_version_and_settings(results):
    with_four, with_two, without = results["factors"]
    assert with_four != with_two and without is None


@pytest.mark.parametrize(
    ("settings", "invariant", "kind", "reason"),
    [
        ({}, "0", object, None),
        ({}, "0", cpu_communicator._CPUSHMDistributed, "its ranks share memory"),
        ({}, "1", object, "VLLM_BATCH_INVARIANT fixes kernels"),
        ({"deterministic": "tp"}, "0", object, "COC_DETERMINISTIC multiplies in tiles"),
    ],
)
def test_what_fixes_its_sums_or_shares_memory_is_left_to_vllm(settings, invariant, kind, reason, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    group = SimpleNamespace(device_communicator=SimpleNamespace(dist_module=object.__new__(kind)))
    found = Vllm(Settings(num_chunks=4, **settings), "0.32.0").uncovered_sum(group)
    assert found is None if reason is None else found.startswith(reason)
