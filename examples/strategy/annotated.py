"""The GPT of gpt.py on 8 processes, by annotations: data x tensor x pipeline parallel, configured by gpt.toml.

torchrun --nproc-per-node 8 examples/strategy/annotated.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, STEPS, batch_of

from ascend_parallel.training import Strategy, train_step


def main() -> list[float]:
    """Train on this rank; return the losses of the whole batches."""
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    strategy = Strategy.from_toml(Path(__file__).with_name("gpt.toml"))
    train = train_step(model, batch_of(0), optimizer, strategy)
    losses = []
    for step in range(STEPS):
        loss = train(*batch_of(step))
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.6f}")
    train.close()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
