"""A program: steps of a GPT under auto on the virtual clock, until the way of whole steps is decided; prints it."""

import json
import os
import sys

import torch
import torch.distributed as dist
from programs import gpt_model, megatron

hidden = int(sys.argv[1])
torch.npu.set_device(int(os.environ["RANK"]))
dist.init_process_group("hccl")
with megatron(
    False, False, hidden_size=hidden, num_attention_heads=hidden // 128, params_dtype=torch.bfloat16, bf16=True
) as config:
    model, mask = gpt_model(config, {"num_chunks": "auto"}, hidden)
    tokens = torch.zeros(2, hidden, dtype=torch.int64, device="npu")
    positions = torch.arange(hidden, device="npu").repeat(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(64):
        model(tokens, positions, mask, labels=tokens).float().mean().backward()
        for weight in model.parameters():
            weight.grad = None
        optimizer.step()  # changes nothing: it says where a step ends
    from megatron.core.tensor_parallel import RowParallelLinear

    groups = RowParallelLinear.forward.ascend_parallel.decider.groups
    print(json.dumps([each.way for each in groups.values()]), flush=True)
dist.barrier()
dist.destroy_process_group()
