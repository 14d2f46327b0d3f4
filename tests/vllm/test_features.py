"""What runs in production beside overlap: adapters, quantised layers, guessed tokens, MLA."""

import json
import os
from pathlib import Path

import pytest
from generate import saved_model
from ranks import collected

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


def saved_drafter(folder):
    """Return the folder of EAGLE's draft model: a layer of the llama, behind a matmul of a token and a hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    model, path = Path(saved_model("llama", folder)), Path(folder) / "eagle"
    path.mkdir(exist_ok=True)
    own = {
        key.removeprefix("model."): weight
        for key, weight in load_file(model / "model.safetensors").items()
        if key.startswith("model.layers.0.") and "input_layernorm" not in key
    }
    half = 0.5 * torch.eye(own["layers.0.post_attention_layernorm.weight"].shape[0])
    save_file({**own, "fc.weight": torch.cat([half, half], 1)}, path / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return str(path)


def in_int8(folder):
    """Return the folder of the llama in int8: scales per channel, of activations per token, and fixed in row layers."""
    import torch

    number = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = {**number, "strategy": "channel", "dynamic": False}
    kinds = {  # by targets
        "Linear": {**number, "strategy": "token", "dynamic": True},
        "re:.*(o|down)_proj": {**number, "strategy": "tensor", "dynamic": False},
    }

    def packed(name, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        fixed = {f"{name}.input_scale": torch.tensor([0.03])} if name.endswith((".o_proj", ".down_proj")) else {}
        return {f"{name}.weight": (weight / scale).round().char(), f"{name}.weight_scale": scale, **fixed}

    groups = {
        f"group_{index}": {"targets": [target], "weights": weights, "input_activations": inputs}
        for index, (target, inputs) in enumerate(kinds.items())
    }
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    return quantised_model(folder, "llama-int8", packed, {**said, "config_groups": groups})


def in_int4(folder):
    """Return the folder of the llama as GPTQ writes it: weights in 4 bits, a scale for each 64 rows of a column."""
    import torch

    size = 64

    def packed(name, weight):
        columns = weight.t()  # [K, N]
        scale = columns.unflatten(0, (-1, size)).abs().amax(1) / 7
        number = (columns / scale.repeat_interleave(size, 0)).round().clamp(-8, 7).long() + 8
        eight = number.unflatten(0, (-1, 8)) << (4 * torch.arange(8)).view(1, 8, 1)
        zeros = torch.full((scale.shape[0], scale.shape[1] // 8), 0x77777777, dtype=torch.int32)
        return {f"{name}.qweight": eight.sum(1).to(torch.int32), f"{name}.scales": scale, f"{name}.qzeros": zeros}

    said = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": False, "lm_head": False}
    return quantised_model(folder, "llama-int4", packed, said)


def quantised_model(folder, name, packed, said):
    """Return the folder of the llama whose linear layers have the tensors that `packed` makes of their weights."""
    from safetensors.torch import load_file, save_file

    model, path, tensors = Path(saved_model("llama", folder)), Path(folder) / name, {}
    path.mkdir(exist_ok=True)
    for key, weight in load_file(model / "model.safetensors").items():
        tensors |= packed(key.removesuffix(".weight"), weight) if "_proj" in key else {key: weight}
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
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


def int8(folder):
    return of_model("llama-int8", folder)


def gptq(folder):
    return of_model("llama-int4", folder)


def of_model(name, folder):
    from generate import engine

    import ascend_parallel

    ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    with engine("llama", folder, model=str(Path(folder) / name), dtype="bfloat16") as llm:
        return compared(llm)


def speculative(folder):
    """Tokens guessed from the prompt, and verified several at a time."""
    from generate import engine

    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine("llama", folder, speculative_config=guess) as llm:
        return compared(llm, tokens=12)


def drafted(folder):
    """Tokens guessed by a draft model, which reads the hidden states of the model."""
    from generate import engine

    guess = {"method": "eagle", "model": str(Path(folder) / "eagle"), "num_speculative_tokens": 2}
    with engine("llama", folder, speculative_config=guess) as llm:
        return compared(llm, tokens=12)


def latent_attention(folder):
    """Multi-head latent attention, which vLLM runs in bf16 alone on CPUs, with experts and a shared expert."""
    from generate import engine

    with engine("deepseek_bf16", folder) as llm:
        return compared(llm)


# Speculation comes last: once its numba is imported, vLLM 0.32 cannot start another engine in the process.
CASES = (with_adapters, int8, gptq, latent_attention, drafted, speculative)
LONGER = (latent_attention, drafted, speculative)


def all_cases(folder):
    wanted = os.environ["CASES"].split(",")
    return {case.__name__: case(folder) for case in CASES if case.__name__ in wanted}


@pytest.fixture(scope="module")
def results(request, pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    for family in ("llama", "deepseek_bf16"):
        saved_model(family, folder)
    for number in (1, 2):
        saved_adapter(folder, f"lora{number}", number)
    in_int8(folder)
    in_int4(folder)
    saved_drafter(folder)
    wanted = collected(request, "case", [case.__name__ for case in CASES])
    found = pair.call(all_cases, folder, CASES=",".join(wanted))
    if speculative.__name__ in wanted:
        pair.end()
    return found


@pytest.mark.promise("vllm-features")
@pytest.mark.parametrize(
    "case", [pytest.param(case.__name__, marks=pytest.mark.slow if case in LONGER else ()) for case in CASES]
)
def test_tokens_and_logprobs_are_those_of_vllm(case, results):
    first, second = (found[case] for found in results[0])
    assert first["ours"] == second["ours"] == first["plain"]
    assert first["counts"]["region"]["chunks"] > 0


@pytest.mark.parametrize("case", ["int8", "gptq"])
def test_quantised_row_layers_multiply_the_rows_that_have_arrived(case, results):
    assert results[0][0][case]["counts"]["matmul_all_reduce"]["chunks"] > 0


def test_adapters_are_in_the_results(results):
    adapters = results[0][0]["with_adapters"]
    assert all(one != other for one, other in zip(adapters["ours"][:2], adapters["without"], strict=False))


def test_the_log_and_the_coverage_name_what_runs_as_in_vllm(results):
    lines = [line for line in results[1].splitlines() if "vllm: overlap covers" in line]
    adapters, *packed = lines[:3]
    assert "covers 0 of 4 row-parallel layers; 4: its adapters belong to the first tokens of a step" in adapters
    assert all("covers 4 of 4 row-parallel layers" in line and "(CompressedTensors" not in line for line in packed)
    coverage = results[0][0]["with_adapters"]["coverage"]
    assert coverage.startswith("0 of 4 linear layers covered (4 RowParallelLinear: its adapters belong")
    assert coverage.endswith("; 4 others communicate nothing")
