"""Train and run a Hugging Face model of random weights with its tp_plan.

    torchrun --nproc-per-node 2 examples/frameworks/transformers_tp.py
    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/transformers_tp.py --model Qwen2
    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/transformers_tp.py --accelerate
    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/transformers_tp.py --model Mixtral --ep

With --accelerate the optimizer and the backward are accelerate's. With --ep the model's ep_plan shares its
experts among the ranks, and FSDP the rest.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from results import Results, dtype_of, gradients_of, options, tokens
from transformers.distributed import DistributedConfig

args = options(__doc__, model="Llama", generate=False, accelerate=False, ep=False)


def main() -> None:
    """Train some steps; with --generate also generate from a prompt."""
    accelerator = Accelerator(cpu=True) if args.accelerate else None
    if accelerator is None:
        dist.init_process_group("gloo")
    model = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if accelerator is not None:
        optimizer = accelerator.prepare(optimizer)
    results = Results()
    for step in range(args.steps):
        ids = tokens(args, step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        (accelerator.backward if accelerator is not None else torch.Tensor.backward)(loss)
        results.add(loss, gradients_of(model))
        optimizer.step()
    if args.generate:
        text = model.eval().generate(tokens(args, 0)[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
        results.generated["tokens"] = text
    results.write(args.out)
    dist.destroy_process_group()


def load() -> torch.nn.Module:
    """Write a random model on rank 0, and load it on every rank, sharded by its plan."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # rank 0's
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            config = getattr(transformers, f"{args.model}Config")(
                hidden_size=args.hidden,
                intermediate_size=args.inner,
                num_hidden_layers=args.layers,
                num_attention_heads=args.heads,
                vocab_size=args.vocabulary,
                **({} if args.model.startswith("GPT") else {"num_key_value_heads": args.heads}),
            )
            getattr(transformers, f"{args.model}ForCausalLM")(config).save_pretrained(folder[0])
        dist.barrier()
        ranks = int(os.environ["WORLD_SIZE"])
        plan = DistributedConfig(tp_size=ranks, tp_plan="auto")
        if args.ep:
            plan = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder[0], distributed_config=plan, dtype=dtype_of(args)
        )
        dist.barrier()
    return model


if __name__ == "__main__":
    main()
