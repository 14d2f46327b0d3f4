"""The GPT in two stages on meshes of 2 x 2 and of 4 x 1 ranks: data and tensor parallel, then data parallel alone.

    torchrun --nproc-per-node 8 examples/strategy/stage_meshes.py

The losses are those of one card. The embedding lies on both meshes: it is tied to the head.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpt
import torch
import torch.distributed as dist

from ascend_parallel.training import Strategy, train_step

FILE = Path(__file__).with_suffix(".toml")


def train() -> list[float]:
    """Return the losses of the first steps."""
    torch.manual_seed(0)
    model = gpt.GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy.from_toml(FILE))
    if dist.get_rank() == 0:
        print(step.explain())
    losses = [step(*gpt.batch_of(number)).item() for number in range(gpt.STEPS)]
    step.close()
    return losses


def one_card() -> list[float]:
    """Return the losses of the whole model on this rank, with the same clipping."""
    torch.manual_seed(0)
    model, losses = gpt.GPT().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(gpt.STEPS):
        optimizer.zero_grad()
        loss = model(*gpt.batch_of(number))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Train both; return 0 if their losses agree."""
    dist.init_process_group("gloo")
    losses, expected = train(), one_card()
    worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"losses {losses[0]:.6f} ... {losses[-1]:.6f}; one card {expected[0]:.6f} ... {expected[-1]:.6f}")
        print(f"largest difference {worst:.1e}")
    dist.destroy_process_group()
    return int(worst > 1e-9)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node 8 examples/strategy/stage_meshes.py")
    sys.exit(main())
