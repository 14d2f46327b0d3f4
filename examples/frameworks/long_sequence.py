"""Train a Llama of random weights on sequences that the ranks share; alone, a rank has the whole sequences.

    python examples/frameworks/long_sequence.py
    torchrun --nproc-per-node 2 examples/frameworks/long_sequence.py
    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/long_sequence.py

The losses are the same up to the order of sums over ranks; with COC_PARALLEL_NUM they have the bits of the run without.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from results import Results, dtype_of, gradients_of, options, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from ascend_parallel.patches.transformers import context_parallel

args = options(__doc__, rows=2048, batch=1)


def main() -> None:
    """Train some steps; every rank makes the same batch and keeps its own tokens of it."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        vocab_size=args.vocabulary,
        max_position_embeddings=args.rows,
    )
    model = LlamaForCausalLM(config).to(dtype_of(args))
    context = context_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results = Results()
    for step in range(args.steps):
        ids = tokens(args, step)
        loss = model(**context.cut(ids, ids)).loss  # of this rank's tokens, as a share of all
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        whole = loss.detach()
        dist.all_reduce(whole)
        results.add(whole, gradients_of(model))
        optimizer.step()
    results.write(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
