"""Train a Hugging Face model of random weights with DeepSpeed AutoTP, and ZeRO beside it.

torchrun --nproc-per-node 2 examples/frameworks/deepspeed_tp.py
COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/deepspeed_tp.py --zero 1 --dtype bfloat16
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import safe_get_full_grad
from results import Results, options, tokens

args = options(__doc__, zero=0)


def main() -> None:
    """Train some steps."""
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        vocab_size=args.vocabulary,
    )
    settings = {
        "train_micro_batch_size_per_gpu": args.batch,
        "tensor_parallel": {"autotp_size": dist.get_world_size()},
        "zero_optimization": {"stage": args.zero},
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=transformers.LlamaForCausalLM(config), config=settings)
    results = Results()
    for step in range(args.steps):
        ids = tokens(args, step)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        named = engine.module.named_parameters()
        results.add(loss, {name: safe_get_full_grad(each) if args.zero else each.grad for name, each in named})
        engine.step()
    results.write(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
