"""What watches a run: COC_VERIFY beside vLLM's own layers, and timelines of a prefill with and without chunks."""

from pathlib import Path

import pytest
from generate import saved_model
from ranks import on_two_ranks

from ascend_parallel.diagnostics.timeline.merge import merge

LENGTHS = [600, 90]


def observed(folder):
    """Return what one engine generates plain, checked and recorded, and what the checks and the counts tell."""
    from generate import engine, generated

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    found = {}
    with engine("llama_of_one_layer", folder) as llm:

        def run(name, **settings):
            ascend_parallel.configure(**settings)
            COUNTS.clear()
            found[name] = {"made": generated(llm, LENGTHS), "counts": COUNTS.as_dict()}

        run("plain", num_chunks=1)
        run("checked", num_chunks=4, verify_every=1, frameworks=("vllm",))
        found["checked"]["report"] = ascend_parallel.verification().as_dict()
        for name, settings in (("overlapped", {"num_chunks": 4}), ("serial", {"mode": 1})):
            with ascend_parallel.timeline.record(Path(folder) / name):
                run(name, frameworks=("vllm",), **settings)
        ascend_parallel.configure(num_chunks=4, verify_every=1, frameworks=("vllm",))
        (layer,) = (module for module in llm.apply_model(last_row_layer))
        multiply = layer.quant_method.apply
        layer.quant_method.apply = lambda own, x, bias=None: multiply(own, x, bias) * x.abs().max()
        with pytest.raises(ascend_parallel.VerificationError) as error:
            generated(llm, LENGTHS)
        found["fault"] = str(error.value)
        del layer.quant_method.apply
    return found


def last_row_layer(model):
    return [module for module in model.modules() if type(module).__name__ == "RowParallelLinear"][-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    saved_model("llama_of_one_layer", folder)
    return folder, on_two_ranks(observed, folder)[0]


@pytest.mark.parametrize("way", ["checked", "overlapped", "serial"])
def test_what_watches_a_run_changes_nothing(way, results):
    assert all(found[way]["made"] == found["plain"]["made"] for found in results[1])


def test_each_checked_layer_equals_its_own_whole_forward(results):
    for found in results[1]:
        report = found["checked"]["report"]
        assert report["passed"] and not report["failures"]
        layers = {layer["layer"]: layer for layer in report["layers"]}
        assert sorted(layers) == ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"]
        assert all(layer["forwards"] > 0 and layer["errors"] == {"output": 0.0} for layer in layers.values())


def test_a_kernel_that_looks_at_other_rows_is_an_error_on_every_rank(results):
    for found in results[1]:
        assert "model.layers.0.mlp.down_proj (RowParallelLinear, row): the output of call" in found["fault"]
        assert "by vLLM's own" in found["fault"] and "in chunks of rows [128, 128, 128, " in found["fault"]


def test_a_timeline_shows_a_prefill_with_and_without_chunks(results):
    folder = results[0]
    rows = {row.layer: row for row in merge(folder / "overlapped", against=folder / "serial").rows()}
    assert set(rows) == {"model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"}
    for row in rows.values():
        assert row.kernel == "chunked 5" and row.comm > 0 and row.hidden is not None and row.serial > 0
