"""Tensor parallelism beside pipeline and data parallelism, on four ranks."""

import pytest
from generate import saved_model
from ranks import on_ranks

LENGTHS = [600, 90]
CASES = {"data": {"data_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


def beside(folder):
    """Return what each case generates with overlap and as it is, and what was counted."""
    from generate import engine, generated

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    found = {}
    for name, options in CASES.items():
        ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
        with engine("llama", folder, **options) as llm:
            # In a dummy step a stage makes the tensors that it receives; vLLM on CPUs runs none eagerly.
            llm.collective_rpc(dummy_step)
            COUNTS.clear()
            ours, counts = generated(llm, LENGTHS), COUNTS.as_dict()
            ascend_parallel.configure(num_chunks=1)
            found[name] = {"ours": ours, "plain": generated(llm, LENGTHS), "counts": counts}
    return found


def dummy_step(worker):
    worker.model_runner._dummy_run(1536)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    saved_model("llama", folder)
    return on_ranks(4, beside, folder)[0]


@pytest.mark.slow
@pytest.mark.promise("vllm-features")
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_vllm(case, results):
    for found in results:
        assert found[case]["ours"] == found[case]["plain"]
        assert found[case]["counts"]["region"]["chunks"] > 0
