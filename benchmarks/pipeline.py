"""Measure the bubbles of a pipeline step and its peak memory, beside the simulation and the published formula.

    torchrun --nproc-per-node 2 benchmarks/pipeline.py

A stack of linear layers of 512 x 512 in fp32, two layers per stage, one rank per group; medians of some rounds.
Activation memory is the peak of live tensors in a step, minus those alive before the step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.sharding import ProcessMesh, propagate, trace
from ascend_parallel.training.pipeline.pipeline import Pipeline
from ascend_parallel.training.pipeline.schedule import closed_bubble
from ascend_parallel.training.pipeline.step_times import Measured

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from allocations import peak_bytes

WIDTH, ROWS, ROUNDS = 512, 512, 15
# Schedule, stages on each rank.
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("zbv", 2))
COUNTS = (2, 4, 8)


class Stack(nn.Module):
    """Linear layers, all of the same size, and the mean square."""

    def __init__(self, layers: int) -> None:
        """Make them."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def measured(schedule: str, several: int, count: int) -> tuple[Pipeline, list[Measured], int]:
    """Return the pipeline, its steps, and the peak bytes of a step."""
    ranks = dist.get_world_size()
    stages = ranks * several
    torch.manual_seed(0)
    model, x = Stack(2 * 2 * ranks), torch.randn(count * ROWS, WIDTH)
    meshes = [ProcessMesh([rank], ["mp"]) for rank in range(ranks)]
    plan = propagate(trace(model, (x[:ROWS],)), meshes[0])
    by_layer = {f"layers.{layer}": layer * stages // (4 * ranks) for layer in range(4 * ranks)}
    pipeline = Pipeline(model, plan, by_layer, meshes, schedule=schedule, micro_batches=count, overlap=False)
    steps = []
    for _ in range(ROUNDS):
        steps.append(pipeline.measure(x))
        pipeline.zero_grad()
    peak = peak_bytes(lambda: pipeline.step(x))
    return pipeline, steps[2:], peak


def main() -> None:
    """Print a line for each schedule and number of micro-batches."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    if first:
        print("| schedule | micro-batches | bubbles measured | simulated | formula | step ms | peak MB of rank 0 |")
        print("|---|---|---|---|---|---|---|")
    for schedule, several in SCHEDULES:
        for count in COUNTS:
            _, steps, peak = measured(schedule, several, count)
            if first:
                closed = closed_bubble(schedule, ranks, ranks * several, count)
                formula = "" if closed is None else f"{closed:.1%}"
                bubble, simulated = (median(of) for of in zip(*map(_bubbles, steps), strict=True))
                seconds = median(step.seconds[0] for step in steps)
                print(
                    f"| {schedule} | {count} | {bubble:.1%} | {simulated:.1%} | {formula} | {1000 * seconds:.1f} | "
                    f"{peak / 1e6:.1f} |"
                )
    dist.destroy_process_group()


def _bubbles(step: Measured) -> tuple[float, float]:
    return step.bubble, step.simulated.bubble


if __name__ == "__main__":
    main()
