"""Train the GPT of gpt.py by a strategy, with checkpoints; continue from the last checkpoint after a restart.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else processes that torchrun restarts get the old ones' addresses
torchrun --nproc-per-node 8 --max-restarts 3 examples/strategy/train.py --checkpoints checkpoints
torchrun --nproc-per-node 2 examples/strategy/train.py --strategy data.toml --checkpoints checkpoints --steps 40

The last command continues from the first's checkpoint in another layout.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, batch_of

from ascend_parallel.training import Strategy, train_step
from ascend_parallel.training.checkpoint import latest

HERE = Path(__file__).parent


def main() -> None:
    """Train on this rank."""
    options = arguments()
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = train_step(model, batch_of(0), optimizer, Strategy.from_toml(options.strategy))
    if latest(options.checkpoints) is not None:
        step.load(options.checkpoints)
    while step.batches < options.steps:
        number = step.batches  # the data's position
        fail(number, options)
        loss = step(*batch_of(number))
        if dist.get_rank() == 0:
            print(f"step {number}  loss {loss.item():.17g}", flush=True)
        if step.batches % options.every == 0:
            step.save(options.checkpoints, asynchronous=options.background, keep=2)
    step.close()


def planned() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return the model and a batch, for the command: ascend-parallel strategy examples/strategy/train.py:planned."""
    return GPT().double(), batch_of(0)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", type=Path, default=HERE / "gpt.toml", help="a TOML file")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all ranks share")
    parser.add_argument("--steps", type=int, default=20, help="batches in all")
    parser.add_argument("--every", type=int, default=5, help="batches between checkpoints")
    parser.add_argument("--background", action="store_true", help="write checkpoints while training continues")
    parser.add_argument("--kill", metavar="RANK:STEP", help="end this rank before this step, in the first run")
    return parser.parse_args()


def fail(number: int, options: argparse.Namespace) -> None:
    """End this process as a failing machine would, if --kill asks for it."""
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and options.kill == f"{dist.get_rank()}:{number}":
        os.kill(os.getpid(), 9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main()
    dist.destroy_process_group()
