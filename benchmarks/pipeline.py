"""Measure the bubbles of a pipeline step and its peak memory, beside the simulation and the published formula.

    python benchmarks/pipeline.py

A stack of linear layers of 512 x 512 in fp32, two layers per stage, one rank per group; medians of some rounds.
Activation memory is the peak of live tensors in a step, minus those alive before the step.
"""

from __future__ import annotations

import sys
from statistics import median

import torch
import torch.distributed as dist
from measuring import FOLDER, on_ranks, options_of, run, table
from torch import nn

from ascend_parallel.sharding import ProcessMesh, propagate, trace
from ascend_parallel.training.pipeline.picture import MeasuredStep
from ascend_parallel.training.pipeline.pipeline import Pipeline
from ascend_parallel.tuning.step_time.schedule import closed_bubble

sys.path.append(str(FOLDER.parent / "tests" / "support"))

from allocations import peak_bytes

WIDTH, ROWS = 512, 512
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


def measured(schedule: str, several: int, count: int, rounds: int) -> tuple[list[MeasuredStep], int]:
    """Return the steps of a pipeline, and the peak bytes of a step."""
    ranks = dist.get_world_size()
    stages = ranks * several
    torch.manual_seed(0)
    model, x = Stack(2 * 2 * ranks), torch.randn(count * ROWS, WIDTH)
    meshes = [ProcessMesh([rank], ["mp"]) for rank in range(ranks)]
    plan = propagate(trace(model, (x[:ROWS],)), meshes[0], objective="redistribution")
    by_layer = {f"layers.{layer}": layer * stages // (4 * ranks) for layer in range(4 * ranks)}
    pipeline = Pipeline(model, plan, by_layer, meshes, schedule=schedule, micro_batches=count, overlap=False)
    steps = []
    for _ in range(rounds + 2):
        steps.append(pipeline.measure(x))
        pipeline.zero_grad()
    peak = peak_bytes(lambda: pipeline.step(x))
    return steps[2:], peak


def main() -> None:
    """Measure, print a line for each schedule and number of micro-batches."""
    parser = options_of(__doc__, link=False, rounds=13)
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    options = parser.parse_args()
    heads = ("schedule", "micro-batches", "bubbles measured", "simulated", "formula", "step ms", "peak MB of rank 0")
    print(table(heads, on_ranks("pipeline:rank", options.ranks, rounds=options.rounds)))


def rank(group: dist.ProcessGroup, rounds: int) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for schedule, several in SCHEDULES:
        for count in COUNTS:
            steps, peak = measured(schedule, several, count, rounds)
            closed = closed_bubble(schedule, group.size(), group.size() * several, count)
            row = [schedule, str(count), f"{median(step.bubble for step in steps):.1%}"]
            row += [f"{median(step.simulated.bubble for step in steps):.1%}", "" if closed is None else f"{closed:.1%}"]
            rows.append([*row, f"{1000 * median(step.seconds[0] for step in steps):.1f}", f"{peak / 1e6:.1f}"])
    return rows


if __name__ == "__main__":
    run(main)
