"""A policy-gradient loop: vLLM generates on two ranks, transformers trains on one and on two.

    COC_DETERMINISTIC=invariant COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/policy_gradient/loop.py
    torchrun --nproc-per-node 2 examples/policy_gradient/loop.py

vLLM and both trainers live in the same two processes, as where they share their devices. The model is a Llama of random
weights, and prompts are drawn token ids, the same at every step. The reward of a continuation is the share of its
tokens that are even, its advantage what it has beyond the others of its prompt.
"""

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

LAUNCHED_BY_TORCHRUN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ON_A_LAPTOP = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.update(LAUNCHED_BY_TORCHRUN)
for name, value in ON_A_LAPTOP.items():
    os.environ.setdefault(name, value)

# vLLM reads the variables above when it is imported.
import transformers  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers.distributed import tensor_parallel  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

import ascend_parallel  # noqa: E402

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
INVARIANT = os.environ.get("COC_DETERMINISTIC") == "invariant"
VOCABULARY, PROMPTS, LENGTH, SAMPLES, NEW = 512, 2, 40, 4, 24
Samples = list[tuple[list[int], list[float]]]


def checkpoint(folder: str) -> None:
    """Write a small Llama of random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.06, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def server(folder: str, dtype: str) -> LLM:
    """Return vLLM, whose ranks are those of torchrun."""
    return LLM(
        model=folder,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="external_launcher",
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        block_size=32,
        max_model_len=128,
        max_num_batched_tokens=128,
        seed=0,
    )


class Trainer:
    """A model of transformers and its optimizer, on `degree` ranks; the other ranks hold it again."""

    def __init__(self, folder: str, dtype: str, degree: int) -> None:
        """Load the model, and apply its `tp_plan`."""
        attention = "invariant" if INVARIANT else "sdpa"
        self.model: Any = transformers.LlamaForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        mesh = init_device_mesh("cpu", (RANKS // degree, degree), mesh_dim_names=("dp", "tp"))["tp"]
        tensor_parallel.apply_tensor_parallelism(self.model, mesh, dict(self.model.tp_plan))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def train(self, samples: Samples, epochs: int) -> list[torch.Tensor]:
        """Take a step of policy gradient in each epoch; return the ratios [samples, NEW] of each."""
        tokens = torch.tensor([ids for ids, _ in samples])
        of_server = torch.tensor([own for _, own in samples])
        rewards = rewards_of(tokens).view(PROMPTS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        ratios = []
        for _ in range(epochs):
            of_trainer = ascend_parallel.logprobs(self.model, tokens)[:, -NEW:]
            ratio = torch.exp(of_trainer - of_server)
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            ratios.append(ratio.detach())
        return ratios

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return the whole weights, by the names of the checkpoint."""
        named = self.model.state_dict().items()
        return [(name, each.full_tensor() if hasattr(each, "full_tensor") else each) for name, each in named]


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return the rewards [samples] of tokens [samples, LENGTH + NEW]."""
    return (tokens[:, -NEW:] % 2 == 0).float().mean(1)


def generate(llm: LLM) -> Samples:
    """Return sequences of a prompt and NEW tokens, with the logprobs of these, SAMPLES of each prompt."""
    prompts = torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = SamplingParams(n=SAMPLES, temperature=1, max_tokens=NEW, logprobs=0, detokenize=False, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [
        (
            ids + list(made.token_ids),
            [each[token].logprob for each, token in zip(made.logprobs, made.token_ids, strict=True)],
        )
        for ids, result in zip(prompts, results, strict=True)
        for made in result.outputs
    ]


def hand_over(llm: LLM, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Have the server go on with other weights; what it has cached are keys of those before."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    llm.reset_prefix_cache()


def range_of(ratio: torch.Tensor) -> str:
    """Return the least and the largest ratio; 1 is printed for exactly 1 alone."""
    least, largest = ratio.min().item(), ratio.max().item()
    return "exactly 1" if least == largest == 1 else f"{least:.4f} to {largest:.4f}"


def main() -> None:
    """Generate, train and hand over, some times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(folder)
        llm = server(folder, options.dtype)
        trainers = {degree: Trainer(folder, options.dtype, degree) for degree in (1, RANKS)}
    for step in range(options.steps):
        samples = generate(llm)
        reward = rewards_of(torch.tensor([ids for ids, _ in samples])).mean().item()
        line = [f"step {step}  reward {reward:.3f}"]
        for degree, trainer in trainers.items():
            first, *later = trainer.train(samples, options.epochs)
            line.append(f"trainer on {degree}: {', then '.join(map(range_of, (first, *later[-1:])))}")
        hand_over(llm, trainers[RANKS].weights())
        if INVARIANT:
            held = [ascend_parallel.weight_digests(trainer.model) for trainer in trainers.values()]
            equal = held[0] == held[1] == llm.apply_model(ascend_parallel.weight_digests)[0]
            line.append(f"weights of all three {'equal' if equal else 'DIFFER'}")
        if RANK == 0:
            print("  ".join(line), flush=True)
    llm.llm_engine.engine_core.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
