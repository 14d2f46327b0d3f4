"""COC_DETERMINISTIC=invariant: vLLM and transformers have the same logprobs, bit for bit, at any degrees."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from generate import engine, saved_model
from ranks import LIMIT, environment, on_ranks

LENGTHS, NEW, DRAWN = (5, 17, 64, 130), 6, 4
WIDTH = 160


def prompts():
    draw = random.Random(1)
    return [[draw.randrange(3, 500) for _ in range(length)] for length in LENGTHS]


def models(folder):
    """Return the families and dtypes that the tests of this run ask for."""
    return json.loads((Path(folder) / "models.json").read_text())


def generated(llm, inputs, new=NEW, prompt=True):
    """Return for each prompt its tokens, their logprobs, and those of the prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=new,
        detokenize=False,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if prompt else None,
    )
    found = []
    for ids, result in zip(
        inputs, llm.generate([{"prompt_token_ids": ids} for ids in inputs], sampling, use_tqdm=False), strict=True
    ):
        tokens = list(result.outputs[0].token_ids)
        own = [step[token].logprob for step, token in zip(result.outputs[0].logprobs, tokens, strict=True)]
        of_prompt = (
            [step[token].logprob for step, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
            if prompt
            else []
        )
        found.append([tokens, own, of_prompt])
    return found


def serve(folder):
    """Return what vLLM generates with each model: alone, in batches, in chunked prefill, from its cache, recomputed."""
    import ascend_parallel

    found = {}
    for family, dtype in models(folder):
        options = {"enable_prefix_caching": True, "max_num_batched_tokens": 96, "max_model_len": 256, "dtype": dtype}
        with engine(
            family, folder, tensor_parallel_size=int(os.environ["WORLD_SIZE"]), block_size=32, **options
        ) as llm:
            inputs, draw = prompts(), random.Random(2)
            alone = [generated(llm, [ids])[0] for ids in inputs]
            again = [ids + made[0] for ids, made in zip(inputs, alone, strict=True)]
            shuffled = draw.sample(range(len(inputs)), len(inputs))
            batch = generated(llm, [inputs[index] for index in shuffled])
            found[f"{family} {dtype}"] = {
                "alone": alone,
                "batch": [batch[shuffled.index(index)] for index in range(len(inputs))],
                "cached": generated(llm, inputs, prompt=False),
                "recomputed": [made[2] for made in generated(llm, again, new=1)],
                "drawn": in_drawn_batches(llm, again, draw),
                "weights": llm.apply_model(ascend_parallel.weight_digests)[0],
            }
    return found


def in_drawn_batches(llm, sequences, draw):
    """Return what vLLM gives to drawn parts of sequences in drawn batches: each with its sequence and its length."""
    found = []
    for _ in range(DRAWN):
        chosen = [draw.randrange(len(sequences)) for _ in range(draw.randrange(2, 9))]
        lengths = [draw.randrange(2, len(sequences[index])) for index in chosen]
        parts = [sequences[index][:length] for index, length in zip(chosen, lengths, strict=True)]
        made = generated(llm, parts, new=draw.randrange(1, NEW))
        found += [[*each] for each in zip(chosen, lengths, made, strict=True)]
    return found


def trained(folder):
    """Return what transformers gives to the tokens that the server made: alone, in padded batches, with gradients."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import tensor_parallel as styles

    import ascend_parallel
    from ascend_parallel.patches.transformers import on_one_rank

    dist.init_process_group("gloo")
    found = {}
    sequences = json.loads((Path(folder) / "sequences.json").read_text())
    for family, dtype in models(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            saved_model(family, folder), dtype=getattr(torch, dtype), attn_implementation="invariant"
        )
        if dist.get_world_size() == 1:
            model = on_one_rank(model)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
            model = styles.apply_tensor_parallelism(model, mesh, dict(model.tp_plan))
        whole = sequences[f"{family} {dtype}"]
        alone = [ascend_parallel.logprobs(model, torch.tensor([ids]))[0] for ids in whole]
        sum(each.sum() for each in alone).backward()
        padded = {}
        for side in ("left", "right"):
            pads = [[0] * (WIDTH - len(ids)) for ids in whole]
            rows = [[pad, ids] if side == "left" else [ids, pad] for ids, pad in zip(whole, pads, strict=True)]
            ids = torch.tensor([first + second for first, second in rows])
            mask = torch.tensor(
                [[int(part is own) for part in row for _ in part] for row, own in zip(rows, whole, strict=True)]
            )
            with torch.no_grad():
                made = ascend_parallel.logprobs(
                    model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
                )
            starts = [WIDTH - len(ids) if side == "left" else 0 for ids in whole]
            padded[side] = [
                row[start : start + len(ids) - 1].tolist() for row, start, ids in zip(made, starts, whole, strict=True)
            ]
        gradients = {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for name, p in model.named_parameters()
        }
        found[f"{family} {dtype}"] = {
            "alone": [each.tolist() for each in alone],
            **padded,
            "weights": ascend_parallel.weight_digests(model),
            "gradients": {name: digest(whole_of(each)) for name, each in gradients.items()},
        }
    dist.destroy_process_group()
    return found


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(tensor):
    import hashlib

    import torch

    return hashlib.sha1(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def asked(folder, cases):
    (folder / "models.json").write_text(json.dumps(cases))
    for family, _ in cases:
        saved_model(family, folder)


def served_at(folder, degree, chunks=1, deterministic="invariant"):
    found = on_ranks(degree, serve, folder, COC_DETERMINISTIC=deterministic, COC_PARALLEL_NUM=chunks)[0]
    assert all(each == found[0] for each in found)
    return found[0]


def sequences_for(folder, served):
    """Write the sequences that a server made, for trainers."""
    sequences = {
        name: [ids + made[0] for ids, made in zip(prompts(), found["alone"], strict=True)]
        for name, found in served.items()
    }
    (folder / "sequences.json").write_text(json.dumps(sequences))


def trained_at(folder, degree, chunks=1, deterministic="invariant"):
    found = on_ranks(degree, trained, folder, COC_DETERMINISTIC=deterministic, COC_PARALLEL_NUM=chunks)[0]
    assert all(each == found[0] for each in found)
    return found[0]


def logprobs_of_server(found):
    """Return the logprobs of each sequence, prompt and generated, after checking that all steps gave the same."""
    alone = [of_prompt + own for _, own, of_prompt in found["alone"]]
    assert found["batch"] == found["alone"]
    assert [made[:2] for made in found["cached"]] == [made[:2] for made in found["alone"]]
    assert found["recomputed"] == alone
    tokens = [own for own, _, _ in found["alone"]]
    for index, length, (made, own, of_prompt) in found["drawn"]:
        assert of_prompt == alone[index][: length - 1]
        if (begun := length - LENGTHS[index]) >= 0:  # after a part of a prompt it goes on in another way
            expected = tokens[index][begun : begun + len(made)]
            assert made[: len(expected)] == expected
            assert own[: len(expected)] == alone[index][length - 1 : length - 1 + len(expected)]
    return alone


def check(served, trained):
    for name, found in served.items():
        expected = logprobs_of_server(found)
        assert trained[name]["weights"] == found["weights"]
        for way in ("alone", "left", "right"):
            assert trained[name][way] == expected, (name, way)


@pytest.mark.promise("invariant-server")
def test_a_trainer_on_one_rank_and_a_server_on_two_have_the_same_logprobs(tmp_path):
    asked(tmp_path, [("llama", "float32"), ("qwen3", "bfloat16")])
    served = served_at(tmp_path, 2, chunks=4)
    sequences_for(tmp_path, served)
    check(served, trained_at(tmp_path, 1))


ALL = [(family, dtype) for family in ("llama", "mistral", "qwen2", "qwen3") for dtype in ("float32", "bfloat16")]


@pytest.mark.slow
@pytest.mark.promise("invariant-server")
def test_any_degrees_and_chunks_have_the_same_logprobs_and_gradients(tmp_path):
    asked(tmp_path, ALL)
    first = served_at(tmp_path, 1)
    sequences_for(tmp_path, first)
    trainers = [trained_at(tmp_path, degree, chunks) for degree, chunks in ((1, 1), (2, 1), (2, 8), (4, 2))]
    assert all(each == trainers[0] for each in trainers)
    for served in (first, served_at(tmp_path, 2), served_at(tmp_path, 2, 8), served_at(tmp_path, 4, 2)):
        assert served == first
        check(served, trainers[0])


@pytest.mark.slow
def test_the_tree_alone_has_other_logprobs(tmp_path):
    """The comparisons above can fail: a trainer with COC_DETERMINISTIC=tp has other bits."""
    asked(tmp_path, [("llama", "float32")])
    served = served_at(tmp_path, 1, deterministic="0")
    sequences_for(tmp_path, served)
    with pytest.raises(AssertionError):
        check(served, trained_at(tmp_path, 1))


def verified(folder, *options, **variables):
    """Run the command on a checkpoint; return its exit code and what it printed."""
    prompts_file = folder / "prompts.jsonl"
    prompts_file.write_text("".join(f"{json.dumps(ids)}\n" for ids in prompts()[:3]))
    command = [
        sys.executable,
        "-m",
        "ascend_parallel",
        "verify",
        "--prompts",
        str(prompts_file),
        "--new",
        "3",
        *options,
    ]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.promise("invariant-verify")
def test_the_command_finds_equal_bits_and_a_planted_fault(tmp_path):
    checkpoint = saved_model("llama", tmp_path)
    code, text, errors = verified(tmp_path, "--against-server", checkpoint, "--server-tp", "2", "--json")
    assert code == 0, errors
    found = json.loads(text.splitlines()[-1])
    assert found["equal"] == found["logprobs"] > 80
    code, text, errors = verified(tmp_path, "--against-server", checkpoint, PLANTED="norm")
    assert code == 1, errors
    assert "model.layers.0.input_layernorm is the first module that differs, in the row of token 1" in text
    code, text, errors = verified(tmp_path, "--against-server", checkpoint, PLANTED="tile")
    assert code == 1, errors
    assert "model.layers.0.self_attn.o_proj is the first module that differs, in the row of token 1" in text


def refused(folder):
    """Return why models are refused: another architecture, an option, and another plugin's module."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    class Own(RMSNorm):
        """A norm that another plugin registers."""

    found = {}
    for name, family, options in (
        ("family", "gemma2", {}),
        ("graphs", "llama", {"enforce_eager": False}),
        ("windows", "mistral_with_windows", {}),
        ("scales", "mistral_with_scales", {}),
        ("norm", "llama", {}),
    ):
        if name == "norm":
            RMSNorm.register_oot(_decorated_op_cls=Own, name="RMSNorm")
        try:
            with engine(family, folder, tensor_parallel_size=1, max_model_len=64, **options):
                found[name] = "it is served"
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.promise("invariant-refused")
def test_what_was_not_compared_is_refused_when_a_worker_has_loaded_it(tmp_path):
    for family in ("gemma2", "llama", "mistral_with_windows", "mistral_with_scales"):
        saved_model(family, tmp_path)
    found = on_ranks(1, refused, tmp_path, COC_DETERMINISTIC="invariant")[0][0]
    assert "COC_DETERMINISTIC=invariant: vllm: Gemma2ForCausalLM was not compared with a trainer" in found["family"]
    assert "compiled graphs" in found["graphs"]
    assert "layers.0.self_attn.attn (Attention): a sliding window" in found["windows"]
    assert "layers.0.self_attn (MistralAttention) scales queries by their position" in found["scales"]
    assert "layers.0.input_layernorm (Own) has an arithmetic that was not compared with a trainer's" in found["norm"]


@pytest.mark.slow
@pytest.mark.promise("invariant-refused")
def test_another_version_of_vllm_is_refused_at_its_import():
    program = "import vllm; vllm.__version__ = '0.31.0'; import vllm.model_executor.layers.linear"
    env = environment(COC_DETERMINISTIC="invariant")
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert "COC_DETERMINISTIC=invariant needs a version >=0.32,<0.33, found 0.31.0" in done.stderr
