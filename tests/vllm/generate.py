"""Generate greedily with a small random model on two ranks; print tokens and logprobs as JSON, as started and plain.

python generate.py '{"family": "llama", "prompts": [600, 90], ...}'; the other keys are the arguments of `engine`.
"""

import hashlib
import json
import os
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from ranks import free_port

FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "llama_bf16": (  # a hidden size with which oneDNN has more than one routine
        "LlamaForCausalLM",
        {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_hidden_layers": 1},
    ),
    "opt": ("OPTForCausalLM", {"ffn_dim": 512, "word_embed_proj_dim": 256}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32},
    ),
}
# Models of single tests.
OTHERS = {
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral_with_windows": ("MistralForCausalLM", {"sliding_window": 16}),
    "mistral_with_scales": (
        "MistralForCausalLM",
        {"sliding_window": None, "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}},
    ),
    "llama_of_one_layer": ("LlamaForCausalLM", {"num_hidden_layers": 1}),
    "llama_drawn_anew": ("LlamaForCausalLM", {"initializer_range": 0.06}),
    "deepseek_bf16": (
        "DeepseekV2ForCausalLM",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "num_key_value_heads": 8,
        },
    ),
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


def saved_model(family, folder):
    """Return the folder of a model of the family with random weights."""
    import torch
    import transformers

    name, options = {**FAMILIES, **OTHERS}[family]
    key = hashlib.sha1(json.dumps([name, SIZES, options]).encode()).hexdigest()[:10]
    path = Path(folder) / f"{family}-{key}"
    if not path.exists():
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**{**SIZES, **options})).float()
        for parameter in model.parameters():  # norms' weights of 1 would hide which norm ran
            parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(path)
    return str(path)


@contextmanager
def engine(family, folder, **options):
    """Give vLLM with a model of the family on two ranks, or more; it has ended, on all of them, once this is left.

    An engine of an external launcher owns the process's groups: it destroys them whenever Python collects it, also
    those of the next engine. So it is ended here, and the next one has another store, which no rank takes for the last.
    """
    from vllm import LLM

    known_here({**FAMILIES, **OTHERS}[family][0])
    launched = "RANK" in os.environ
    given = {
        "model": saved_model(family, folder),
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if family.endswith("bf16") else "float32",
        "max_model_len": 1536,
        "max_num_batched_tokens": 1536,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "external_launcher" if launched else "mp",
        "seed": 0,
        **options,
    }
    llm = LLM(**given)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    if launched:
        meet(folder)


def known_here(architecture):
    """Let vLLM look at a model's class in this process: it would import itself in another one for that."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def meet(folder):
    """Wait for the other ranks, and take the port of the next store from rank 0."""
    ranks, name = range(int(os.environ["WORLD_SIZE"])), f"{os.environ['PAIR']}-{os.environ['MASTER_PORT']}"
    met = [Path(folder) / f"{name}-{rank}" for rank in ranks]
    own = met[int(os.environ["RANK"])]
    own.with_suffix(".part").write_text(str(free_port()))
    own.with_suffix(".part").rename(own)
    while not all(file.exists() for file in met):
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = met[0].read_text()


def generated(llm, lengths, tokens=4, **options):
    """Return the tokens and logprobs that follow prompts of random tokens, of the given lengths."""
    from vllm import SamplingParams

    draw = random.Random(1)
    inputs = [{"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for length in lengths]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=2)
    return [
        {
            "tokens": list(result.outputs[0].token_ids),
            "logprobs": [
                sorted((token, value.logprob) for token, value in step.items()) for step in result.outputs[0].logprobs
            ],
        }
        for result in llm.generate(inputs, sampling, use_tqdm=False, **options)
    ]


def as_it_is(worker):
    """Let a worker of a running engine run without overlap."""
    import ascend_parallel

    ascend_parallel.configure(num_chunks=1)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    lengths = given.pop("prompts")
    with engine(**given) as llm:
        found = []
        for _ in range(2):  # each request alone: which of them share a step is chance with vLLM's own processes
            found.append([generated(llm, [length])[0] for length in lengths])
            llm.collective_rpc(as_it_is)
        print("RESULT " + json.dumps(dict(zip(("ours", "plain"), found, strict=True))), flush=True)
