"""Megatron-core's transformer layers, each compiled by torch.compile, with a loop of its own.

    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/megatron_compiled.py

Megatron-core's tensor-parallel linear layers break the graph of torch.compile; an overlapped one runs there as it
is (docs/compile.md). The number of graphs is printed. What is marked "CPU" stands in for an accelerator.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron_cpu import (
    end_model_parallel,
    finalize_gradients,
    megatron_on_cpu,  # CPU
    next_token_loss,
    small_gpt,
    start_model_parallel,
)
from results import Results, gradients_of, options, tokens
from torch._dynamo.utils import counters


def main() -> None:
    """Train some steps."""
    args = options(__doc__, hidden=256, backend="inductor", sequence_parallel=False)
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        start_model_parallel(dist.get_world_size())
        model = small_gpt(
            num_layers=args.layers,
            hidden=args.hidden,
            heads=args.heads,
            vocab=args.vocabulary,
            seq=args.rows,
            sequence_parallel=args.sequence_parallel,
            ffn_hidden_size=args.inner,
        )
        for layer in model.decoder.layers:
            layer.compile(backend=args.backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        results = Results()
        for step in range(args.steps):
            ids = tokens(args, step)
            loss = next_token_loss(model, torch.cat([ids, ids[:, :1]], 1))
            optimizer.zero_grad()
            loss.backward()
            finalize_gradients(model)
            results.add(loss, gradients_of(model))
            optimizer.step()
        if dist.get_rank() == 0:
            breaks = sum(counters["graph_break"].values())
            print(f"{counters['stats']['unique_graphs']} graphs, broken in {breaks} places")
        results.write(args.out)
        end_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
