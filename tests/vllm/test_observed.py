"""What watches and measures a run: COC_VERIFY beside vLLM's own layers, timelines, plan files."""

import json
import os
from pathlib import Path

import pytest
import torch
from generate import saved_model
from ranks import on_two_ranks

from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.tuning.measured.chunk_plan import PlanError

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
        found["of three"] = llm.apply_model(of_three_dimensions)[0]
        for name, settings in (("overlapped", {"num_chunks": 4}), ("serial", {"mode": 1})):
            with ascend_parallel.timeline.record(Path(folder) / name):
                run(name, frameworks=("vllm",), **settings)
        found["tuned"] = tuned(llm, Path(folder) / "plan.json")
        run("planned", plan=planned(folder), frameworks=("vllm",))
        ascend_parallel.configure(plan=planned(folder, threads=7), frameworks=("vllm",))
        with pytest.raises(PlanError) as refused:
            llm.collective_rpc(agree)
        found["refused"] = str(refused.value)
        ascend_parallel.configure(num_chunks=4, verify_every=1, frameworks=("vllm",))
        (layer,) = (module for module in llm.apply_model(last_row_layer))
        multiply = layer.quant_method.apply
        layer.quant_method.apply = lambda own, x, bias=None: multiply(own, x, bias) * x.abs().max()
        with pytest.raises(ascend_parallel.VerificationError) as error:
            generated(llm, LENGTHS)
        found["fault"] = str(error.value)
        del layer.quant_method.apply
    return found


def of_three_dimensions(model):
    """Tell whether a row layer gives rows of three dimensions what it gives them in two, and what was counted."""
    from ascend_parallel.ops import COUNTS

    layer = last_row_layer(model)
    x = torch.randn(300, 2, layer.input_size_per_partition)
    with torch.inference_mode():
        COUNTS.clear()
        y, counts = layer(x)[0], COUNTS.as_dict()
        return torch.equal(y.flatten(0, 1), layer(x.flatten(0, 1))[0]), counts


def tuned(llm, plan):
    """Return what the start of a worker would say, twice, with COC_TUNE; rank 0 writes the plan."""
    import ascend_parallel

    said = []
    for _ in range(2):
        ascend_parallel.configure(tune=str(plan), frameworks=("vllm",))
        said += llm.collective_rpc(timed)
    return said


def framework():
    from vllm.model_executor.layers.linear import RowParallelLinear

    return RowParallelLinear.forward.ascend_parallel


def timed(worker):
    from ascend_parallel.patches.vllm import start

    return start.timed(worker.model_runner, worker.get_model(), worker.vllm_config, framework())


def agree(worker):
    framework().agree(framework().group_of(last_row_layer(worker.get_model())), torch.device("cpu"))


def planned(folder, **machine):
    """Return the path of a plan with the output layer of attention whole, and the MLP's in two chunks."""
    plan = json.loads((Path(folder) / "plan.json").read_text())
    for entry in plan["entries"]:
        first = 128 * (entry["m"] // 256)
        entry["sizes"] = [entry["m"]] if entry["k"] == 128 else [first, entry["m"] - first]
    path = Path(folder) / f"changed-{os.environ['RANK']}-{len(machine)}.json"
    path.write_text(json.dumps({**plan, "machine": {**plan["machine"], **machine}}))
    return str(path)


def last_row_layer(model):
    return [module for module in model.modules() if type(module).__name__ == "RowParallelLinear"][-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    saved_model("llama_of_one_layer", folder)
    return folder, *on_two_ranks(observed, folder)


@pytest.mark.promise("vllm-verify")
@pytest.mark.parametrize("way", ["checked", "overlapped", "serial", "planned"])
def test_what_watches_a_run_changes_nothing(way, results):
    assert all(found[way]["made"] == found["plain"]["made"] for found in results[1])


@pytest.mark.promise("vllm-verify")
def test_each_checked_layer_equals_its_own_whole_forward(results):
    for found in results[1]:
        report = found["checked"]["report"]
        assert report["passed"] and not report["failures"]
        layers = {layer["layer"]: layer for layer in report["layers"]}
        assert sorted(layers) == ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"]
        assert all(layer["forwards"] > 0 and layer["errors"] == {"output": 0.0} for layer in layers.values())


@pytest.mark.promise("vllm-verify")
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


@pytest.mark.promise("vllm-plan")
def test_dummy_steps_are_timed_once_and_kept_in_a_plan(results):
    for found in results[1]:
        first, second = found["tuned"]
        assert first.startswith("COC_TUNE, timed in ") and "1536 tokens " in first and "384 tokens " in first
        assert second.startswith("COC_TUNE: chunks known from ")
    plan = json.loads((results[0] / "plan.json").read_text())
    matmuls = {(entry["operator"], entry["m"], entry["k"], entry["n"]) for entry in plan["entries"]}
    assert matmuls == {("matmul_all_reduce", m, k, 256) for m in (1536, 384) for k in (128, 256)}


@pytest.mark.promise("vllm-plan")
def test_a_plan_cuts_each_layer_by_the_nearest_number_of_tokens(results):
    for found in results[1]:
        counts = found["planned"]["counts"]
        assert counts["matmul_all_reduce"] == {"calls": 1, "chunks": 3, "collectives": 3}
        assert "all_reduce" not in counts  # that of the embedding: of its features, the plan's first layer is whole


@pytest.mark.promise("vllm-plan")
def test_a_plan_of_another_machine_is_refused(results):
    assert all("threads is 1 here and was 7" in found["refused"] for found in results[1])


def test_rows_of_three_dimensions_are_left_to_vllm_and_this_is_said(results):
    assert all(found["of three"] == [True, {}] for found in results[1])
    assert results[2].count("ascend_parallel: RowParallelLinear runs without overlap: its input has 3 dimensions") == 1
