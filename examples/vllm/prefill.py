"""A prefill of vLLM on two ranks: its median time and the tokens that follow. It knows nothing of overlap.

torchrun --nproc-per-node 2 examples/vllm/prefill.py

The model is a Llama of random weights, which stands in for yours: rank 0 writes it to the working folder.
"""

import os
import random
import time
from pathlib import Path
from statistics import median

LAUNCHED_BY_TORCHRUN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ON_A_LAPTOP = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.update(LAUNCHED_BY_TORCHRUN)
for name, value in ON_A_LAPTOP.items():
    os.environ.setdefault(name, value)

RANK, PROMPT, PREFILLS = int(os.environ["RANK"]), 1200, 5


def model() -> str:
    """Return the folder of the model, once it is written."""
    path = Path("vllm-llama")
    if RANK == 0 and not path.exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2048}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
        made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.05, tie_word_embeddings=False))
        made.save_pretrained(path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.1)
    return str(path)


def main() -> None:
    """Generate a few tokens after a long prompt, some times."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model(),
        tensor_parallel_size=2,
        enforce_eager=True,
        distributed_executor_backend="external_launcher",
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1536,
        max_num_batched_tokens=1536,
        seed=0,
    )
    draw = random.Random(0)
    prompt = {"prompt_token_ids": [draw.randrange(2048) for _ in range(PROMPT)]}

    def run(tokens: int) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    tokens, seconds = run(8), []
    for _ in range(PREFILLS):
        begin = time.perf_counter()
        run(1)
        seconds.append(time.perf_counter() - begin)
    if RANK == 0:
        print(f"tokens {tokens}", flush=True)
        print(f"prefill of {PROMPT} tokens: {1e3 * median(seconds):.0f} ms", flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
