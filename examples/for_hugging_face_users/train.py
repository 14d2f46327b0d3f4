"""A training loop around a Llama of transformers: in one process, or tensor-parallel under torchrun.

    python examples/for_hugging_face_users/train.py
    torchrun --nproc-per-node 2 examples/for_hugging_face_users/train.py

It knows nothing of overlap.
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

FOLDER, STEPS, ROWS, LENGTH, VOCABULARY = "small-llama", 4, 4, 128, 512


def load() -> PreTrainedModel:
    """Return the model of the checkpoint; under torchrun this rank's part, as the model's own plan shards it."""
    if "WORLD_SIZE" not in os.environ:
        return AutoModelForCausalLM.from_pretrained(FOLDER).train()
    plan = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(FOLDER, distributed_config=plan).train()


def batch(step: int) -> torch.Tensor:
    """Return tokens ``[ROWS, LENGTH]``, numbers that count up; the same on every rank."""
    starts = torch.randint(VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    """Train, and print every digit of the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lora", type=int, default=0, help="train adapters of this rank alone, by PEFT")
    options = parser.parse_args()
    model = load()
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules=["q_proj", "k_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    for step in range(options.steps):
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.17g}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
