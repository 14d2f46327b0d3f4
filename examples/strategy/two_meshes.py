"""Two matmuls on two meshes of 2 x 2 ranks: data, tensor and pipeline parallel at once, as published for Paddle 3.0.

    torchrun --nproc-per-node 8 examples/strategy/two_meshes.py

Ranks 0 to 3 hold the first weight, ranks 4 to 7 the second. Data are cut along the first dimension of each mesh, the
first weight by columns and the second by rows along the other. Every rank also trains the whole model by itself.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.sharding import ProcessMesh, propagate, trace
from ascend_parallel.training.pipeline.pipeline import Pipeline

MESHES = [ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), ProcessMesh([[4, 5], [6, 7]], ["dp", "mp"])]
# The layouts of each operator's input and weight [N, K].
STRATEGIES = {
    "first": ([("dp", 1), ("mp", 1)], None),
    "second": ([("dp", "mp"), (1, "mp")], None),
}
STEPS, MICRO_BATCHES, ROWS = 10, 4, 8


class TwoMatmuls(nn.Module):
    """A model that returns the mean square of x W1 W2 - y."""

    def __init__(self, width: int = 16, wide: int = 32) -> None:
        """Make the weights and mark each with its stage."""
        super().__init__()
        self.first, self.second = nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False)
        self.first.pipeline_stage = 0
        self.second.pipeline_stage = 1

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run the matmuls."""
        return (self.second(self.first(x)) - y).square().mean()


def train() -> tuple[list[float], list[float]]:
    """Return the losses of the pipeline and of the whole model."""
    torch.manual_seed(0)
    model = TwoMatmuls().double()
    batch = [torch.randn(ROWS * MICRO_BATCHES, 16, dtype=torch.float64) for _ in "xy"]

    graph = trace(model, tuple(tensor[:ROWS] for tensor in batch))
    plan = propagate(graph, MESHES[0], STRATEGIES, objective="redistribution")
    pipeline = Pipeline(
        model,
        plan,
        None,  # the stages marked on the modules
        MESHES,
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
        local_inputs=False,
        settings=Settings(num_chunks=2),
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(float(pipeline.step(*batch)))
        pipeline.reduce_gradients()
        optimizer.step()
        pipeline.zero_grad()
    return losses, train_unsharded(model, batch)


def train_unsharded(model: nn.Module, batch: list[torch.Tensor]) -> list[float]:
    """Return the losses of the model on one rank."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> int:
    """Train the pipeline and the whole model; return 0 if the losses are equal."""
    dist.init_process_group("gloo")
    losses, expected = train()
    worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"losses {losses[0]:.6f} ... {losses[-1]:.6f}; whole model {expected[0]:.6f} ... {expected[-1]:.6f}")
        print(f"largest difference {worst:.1e}")
    dist.destroy_process_group()
    return int(worst > 1e-9)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node 8 examples/strategy/two_meshes.py")
    sys.exit(main())
