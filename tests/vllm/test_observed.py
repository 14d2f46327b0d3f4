"""What watches and measures a run: COC_VERIFY beside vLLM's own layers, timelines, dummy steps, plan files."""

import json
import os
import sys
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
from generate import generated, saved_model

from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.vllm import start
from ascend_parallel.patches.vllm.auto import WHOLE, MeasuredCounts, StepVariant, TimedSteps
from ascend_parallel.tuning.measured.chunk_plan import PlanError

LENGTHS = [600, 90]
TOKENS = 1024  # of a prefill in four chunks
# Of this package in a warm call of a row layer in 4 chunks, as they were counted.
MOST_FUNCTIONS = 93


def observed(folder):
    """Return what one engine generates plain, checked and recorded, and what the checks and the counts tell."""
    from generate import engine

    import ascend_parallel

    found = {}
    with engine("llama_of_one_layer", folder) as llm:

        def run(name, **settings):
            ascend_parallel.configure(**settings)
            COUNTS.clear()
            found[name] = {"made": generated(llm, LENGTHS), "counts": COUNTS.as_dict()}

        run("plain", num_chunks=1)
        run("checked", num_chunks=4, verify_every=1, frameworks=("vllm",))
        found["checked"]["report"] = ascend_parallel.verification().as_dict()
        found["vision"] = vision_encoder(llm.llm_engine.vllm_config)
        for name, settings in (("overlapped", {"num_chunks": 4}), ("serial", {"mode": 1})):
            with ascend_parallel.timeline.record(Path(folder) / name):
                run(name, frameworks=("vllm",), **settings)
        found["functions"] = functions_of_a_row_layer(llm)
        found["tuned"] = tuned(llm, Path(folder) / "plan.json")
        ascend_parallel.configure(auto=True, customized_coc={(1536, 128, 256): 2}, frameworks=("vllm",))
        (found["auto"],) = llm.collective_rpc(said)
        found["timed"] = {"made": generated(llm, LENGTHS)}
        run("planned", plan=planned(folder), frameworks=("vllm",))
        found["bytes"] = most_bytes(llm)
        ascend_parallel.configure(plan=planned(folder, threads=7), frameworks=("vllm",))
        with pytest.raises(PlanError) as refused:
            llm.collective_rpc(agree)
        found["refused"] = str(refused.value)
        ascend_parallel.configure(auto=True, frameworks=("vllm",))
        with mock.patch.object(start, "measure", found_fastest(StepVariant(8))):
            llm.collective_rpc(timed)
        with mock.patch.object(start, "measure", found_fastest(WHOLE)), engine("llama_of_one_layer", folder) as other:
            found["in turn"] = [counted(each) for each in (llm, other, llm)]
            ascend_parallel.configure(num_chunks=4, verify_every=1, frameworks=("vllm",))
            (layer,) = (module for module in llm.apply_model(last_row_layer))
            multiply = layer.quant_method.apply
            layer.quant_method.apply = lambda own, x, bias=None: multiply(own, x, bias) * x.abs().max()
            with pytest.raises(ascend_parallel.VerificationError) as error:
                generated(llm, LENGTHS)
            found["fault"] = str(error.value)
            del layer.quant_method.apply
    return found


def found_fastest(variant):
    """Return what takes the place of the timing of dummy steps, and finds a way the fastest."""
    return lambda step, sizes, variants, group: MeasuredCounts(
        tuple(TimedSteps(tokens, dict.fromkeys(variants, 1.0), variant) for tokens in sizes), 0.0
    )


def counted(llm):
    """Return what an engine generates, and what is counted."""
    COUNTS.clear()
    return generated(llm, LENGTHS), COUNTS.as_dict()


def vision_encoder(config):
    """Tell whether a layer of CLIP's encoder, on [images, patches, features], is as plain; and what was counted."""
    from transformers import CLIPVisionConfig
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.models.clip import CLIPEncoderLayer

    import ascend_parallel

    sizes = CLIPVisionConfig(hidden_size=128, intermediate_size=256, num_attention_heads=4)
    with set_current_vllm_config(config), torch.inference_mode():
        encoder = CLIPEncoderLayer(sizes, attn_cls=MMEncoderAttention)
        for parameter in encoder.parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape)
        for layer in encoder.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(2, 300, 128, generator=torch.Generator().manual_seed(0))
        COUNTS.clear()
        ours, counts = encoder(x), COUNTS.as_dict()
        ascend_parallel.configure(num_chunks=1)
        return torch.equal(ours, encoder(x)), counts


def most_bytes(llm):
    """Return the most bytes of the tensors of a prefill as it is, and with unfinished rows; and the calls by rows."""
    import ascend_parallel

    found = []
    for count in (1, 4):
        ascend_parallel.configure(num_chunks=count, frameworks=("vllm",))
        COUNTS.clear()
        generated(llm, [TOKENS], tokens=1)  # what is kept for the next time
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            generated(llm, [TOKENS], tokens=1)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        found.append(max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))))
    return *found, COUNTS.as_dict().get("region")


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
    return start.timed(worker.model_runner, worker.get_model(), worker.vllm_config, framework())


def said(worker):
    """Return what the start of a worker would say, without vLLM's own steps between."""
    return f"{start.covered(worker.get_model(), worker.vllm_config, framework())}; {timed(worker)}"


def agree(worker):
    framework().agree(framework().group_of(last_row_layer(worker.get_model())), torch.device("cpu"))


def functions_of_a_row_layer(llm):
    """Return the functions of this package that a warm call of a row layer runs, up to its finished rows."""
    import ascend_parallel
    from ascend_parallel.ops.unfinished import finished

    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from counted_functions import functions_of

    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    (layer,) = llm.apply_model(last_row_layer)
    with torch.inference_mode():
        x = torch.randn(TOKENS, layer.input_size_per_partition, dtype=layer.params_dtype)
        for _ in range(3):
            _, called = functions_of(lambda: finished(layer(x)[0]))
    return called


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
def results(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    saved_model("llama_of_one_layer", folder)
    return folder, *pair.call(observed, folder)


@pytest.mark.promise("vllm-verify")
@pytest.mark.parametrize("way", ["checked", "overlapped", "serial", "timed", "planned"])
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


def test_a_warm_call_of_a_row_layer_runs_few_functions_of_this_package(results):
    for found in results[1]:
        assert 0 < sum(found["functions"].values()) <= MOST_FUNCTIONS, found["functions"]


def test_a_timeline_shows_a_prefill_with_and_without_chunks(results):
    folder = results[0]
    rows = {row.layer: row for row in merge(folder / "overlapped", against=folder / "serial").rows()}
    assert set(rows) == {"model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"}
    for row in rows.values():
        assert row.kernel == "chunked 5" and row.comm > 0 and row.hidden is not None and row.serial > 0


def test_unfinished_rows_hold_at_most_one_activation_more(results):
    for found in results[1]:
        plain, ours, regions = found["bytes"]
        assert regions["chunks"] > 0
        assert ours <= plain + TOKENS * 256 * 4, (plain, ours)


def test_auto_times_dummy_steps(results):
    for found in results[1]:
        assert "in 1 to 8 chunks of" in found["auto"]
        assert "1536 tokens " in found["auto"] and "384 tokens " in found["auto"]
        assert "outside the graphs" not in found["auto"]
        assert "; customized_coc has no effect on vLLM's layers; auto, timed in " in found["auto"]


def test_two_engines_of_a_process_run_with_their_own_counts(results):
    for found in results[1]:
        made, counts = zip(*found["in turn"], strict=True)
        assert all(each == found["plain"]["made"] for each in made)
        assert counts[0]["matmul_all_reduce"] == {"calls": 2, "chunks": 10, "collectives": 10}  # 690 tokens, two layers
        assert counts[1] == {} and counts[2] == counts[0]


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


def test_a_vision_encoder_is_left_to_vllm_and_this_is_said(results):
    assert all(found["vision"] == [True, {}] for found in results[1])
    text = "RowParallelLinear runs without overlap: its input has 3 dimensions"
    assert len([line for line in results[2].splitlines() if text in line and "verification: " not in line]) == 1
