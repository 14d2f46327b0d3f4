"""What runs in production beside overlap: adapters, quantised layers, guessed tokens, MLA, weights that change."""

import json
import os
from pathlib import Path

import pytest
from generate import saved_model
from ranks import collected, on_two_ranks

LENGTHS = [900, 600, 90]


def saved_adapter(folder, name, seed):
    """Return the folder of an adapter of drawn weights for all linear layers of the llama."""
    import torch
    from safetensors.torch import load_file, save_file

    model = Path(saved_model("llama", folder))
    rank, generator, tensors, targets = 4, torch.Generator().manual_seed(seed), {}, set()
    for key, weight in load_file(model / "model.safetensors").items():
        if "_proj" in key:
            base = f"base_model.model.{key.removesuffix('.weight')}"
            tensors[f"{base}.lora_A.weight"] = 0.3 * torch.randn(rank, weight.shape[1], generator=generator)
            tensors[f"{base}.lora_B.weight"] = 0.3 * torch.randn(weight.shape[0], rank, generator=generator)
            targets.add(key.split(".")[-2])
    path = Path(folder) / name
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return str(path)


def in_int8(folder):
    """Return the folder of the llama with weights in int8, scales per channel, and activations per token."""
    import torch
    from safetensors.torch import load_file, save_file

    model, path = Path(saved_model("llama", folder)), Path(folder) / "llama-int8"
    path.mkdir(exist_ok=True)
    tensors = {}
    for key, weight in load_file(model / "model.safetensors").items():
        if "_proj" not in key:
            tensors[key] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[key] = (weight / scale).round().to(torch.int8)
        tensors[f"{key}_scale"] = scale
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def compared(llm, lengths=LENGTHS, **options):
    """Return what an engine generates with overlap and as it is, and what was counted."""
    from generate import generated

    import ascend_parallel
    from ascend_parallel.ops import COUNTS

    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    COUNTS.clear()
    ours, counts = generated(llm, lengths, **options), COUNTS.as_dict()
    ascend_parallel.configure(num_chunks=1)
    return {"ours": ours, "plain": generated(llm, lengths, **options), "counts": counts}


def with_adapters(folder):
    """Two adapters and the model without one, in one batch."""
    from generate import engine
    from vllm.lora.request import LoRARequest

    import ascend_parallel

    requests = [LoRARequest(f"lora{number}", number, str(Path(folder) / f"lora{number}")) for number in (1, 2)]
    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    with engine("llama", folder, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        (coverage,) = llm.apply_model(ascend_parallel.coverage)
        found = compared(llm, lora_request=[*requests, None])
        found["without"] = compared(llm)["plain"]
    return {**found, "coverage": str(coverage)}


def quantised(folder):
    from generate import engine

    import ascend_parallel

    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    with engine("llama", folder, model=str(Path(folder) / "llama-int8"), dtype="bfloat16") as llm:
        return compared(llm)


def speculative(folder):
    """Tokens guessed from the prompt, and verified several at a time."""
    from generate import engine

    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine("llama", folder, speculative_config=guess) as llm:
        return compared(llm, tokens=12)


def reloaded(folder):
    """Weights that are replaced in the running engine."""
    from generate import engine

    with engine("llama", folder) as llm:
        before = compared(llm)["ours"]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": saved_model("llama_drawn_anew", folder)})
        return {**compared(llm), "before": before}


def latent_attention(folder):
    """Multi-head latent attention, which vLLM runs in bf16 alone on CPUs, with experts and a shared expert."""
    from generate import engine

    with engine("deepseek_bf16", folder) as llm:
        return compared(llm)


def measured(folder):
    """The number of chunks from dummy steps."""
    from generate import engine, generated

    import ascend_parallel

    ascend_parallel.configure(auto=True, customized_coc={(1536, 128, 256): 2}, frameworks=("vllm",))
    with engine("llama", folder) as llm:
        ours = generated(llm, LENGTHS)
        ascend_parallel.configure(num_chunks=1)
        return {"ours": ours, "plain": generated(llm, LENGTHS), "counts": {}}


# Speculation comes last: once its numba is imported, vLLM 0.32 cannot start another engine in the process.
CASES = (with_adapters, quantised, reloaded, latent_attention, measured, speculative)
LONGER = (latent_attention, speculative)


def all_cases(folder):
    wanted = os.environ["CASES"].split(",")
    return {case.__name__: case(folder) for case in CASES if case.__name__ in wanted}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    for family in ("llama", "llama_drawn_anew", "deepseek_bf16"):
        saved_model(family, folder)
    for number in (1, 2):
        saved_adapter(folder, f"lora{number}", number)
    in_int8(folder)
    wanted = collected(request, "case", [case.__name__ for case in CASES])
    return on_two_ranks(all_cases, folder, CASES=",".join(wanted))


@pytest.mark.promise("vllm-features")
@pytest.mark.parametrize(
    "case", [pytest.param(case.__name__, marks=pytest.mark.slow if case in LONGER else ()) for case in CASES]
)
def test_tokens_and_logprobs_are_those_of_vllm(case, results):
    first, second = (found[case] for found in results[0])
    assert first["ours"] == second["ours"] == first["plain"]
    if case != "measured":  # where one chunk may be the fastest
        assert first["counts"]["region"]["chunks"] > 0


def test_adapters_and_new_weights_are_in_the_results(results):
    adapters, weights = results[0][0]["with_adapters"], results[0][0]["reloaded"]
    assert all(one != other for one, other in zip(adapters["ours"][:2], adapters["without"], strict=False))
    assert weights["ours"] != weights["before"]


def test_the_log_and_the_coverage_name_what_runs_as_in_vllm(results):
    lines = [line for line in results[1].splitlines() if "vllm: overlap covers" in line]
    adapters, int8 = lines[:2]
    assert "covers 0 of 4 row-parallel layers; 4: its adapters belong to the first tokens of a step" in adapters
    assert "covers 0 of 4 row-parallel layers; 4: its rows may share a scale" in int8
    coverage = results[0][0]["with_adapters"]["coverage"]
    assert coverage.startswith("0 of 4 linear layers covered (4 RowParallelLinear: its adapters belong")
    assert coverage.endswith("; 4 others communicate nothing")


def test_auto_times_dummy_steps_before_the_first_request(results):
    (line,) = (line for line in results[1].splitlines() if "auto, timed in" in line)
    assert "in 1 to 8 chunks of" in line and "1536 tokens " in line and "384 tokens " in line
    assert "; customized_coc has no effect on vLLM's layers; " in line
