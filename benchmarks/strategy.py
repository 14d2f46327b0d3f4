"""Time a training step of a GPT on 8 ranks (data 2 x tensor 2 x pipeline 2): torch's parts, by hand, by a strategy.

    python benchmarks/strategy.py                   about nine minutes, on gloo over the loopback
    python benchmarks/strategy.py --link 1gbit      a link for every rank
    python benchmarks/strategy.py --plan 8192       plans the same strategy for 8192 ranks, without processes

fp32, AdamW, 1F1B with 4 micro-batches, tensor parallelism without sequence parallelism; a step is forward, backward,
the gradients' sums and the optimizer. Each case runs in separate processes, so that no other threads disturb it. All
cases run in several turns, in random order. tests/training/test_strategy_examples.py compares the losses of every case
with those of one card.
"""

from __future__ import annotations

import random
import resource
import time
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from measuring import in_turn, milliseconds, on_ranks, options_of, run, table
from strategy_cases import CASES, GPT, RANKS, TORCH, strategy_of_example

from ascend_parallel.training import PipelineOptions
from ascend_parallel.training.pipeline.split_plan import split_into_stages
from ascend_parallel.training.training_plan import plan_training

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 4, 256, 8, 512, 128, 16
LR = 1e-3
LARGE = {"layers": 32, "width": 4096, "heads": 32, "vocabulary": 50304, "length": 2048}


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=10)
    parser.add_argument("--turns", type=int, default=3, help="processes of each case, --rounds steps each; default: 3")
    parser.add_argument(
        "--plan", type=int, metavar="RANKS", help="only plan for this number of ranks (a multiple of 64)"
    )
    options = parser.parse_args()
    if options.plan:
        print(planned(options.plan))
        return
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(options.turns):
        for name in random.Random(turn).sample(list(CASES), len(CASES)):
            title = f"turn {turn + 1} of {options.turns}, {name}:"
            arguments = {"name": name, "rounds": options.rounds}
            times[name] += on_ranks("strategy:rank", RANKS, link=options.link, title=title, **arguments)
    rows = [[name, milliseconds(its, 0), f"{median(times[TORCH]) / median(its):.2f}"] for name, its in times.items()]
    print(table([f"medians of {options.turns} x {options.rounds} steps", "ms", "torch's parts / case"], rows))


def rank(group: dist.ProcessGroup, name: str, rounds: int) -> list[float]:
    """Time a case on this rank."""
    step, batch = CASES[name](model_of_run(), batch_of(0), LR), batch_of(1)
    times = in_turn({name: lambda: step(*batch)}, rounds)
    step.close()
    return times[name]


def model_of_run() -> GPT:
    """Make the model, equal in every process."""
    torch.manual_seed(0)
    return GPT(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and targets, equal in every process."""
    drawn = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def planned(ranks: int) -> str:
    """Plan the training of a large GPT by the same strategy; return the time and memory of planning."""
    if ranks % 64:
        raise ValueError(f"--plan {ranks}: give a multiple of 64, of 8 tensor-parallel ranks in 8 stages")
    replicas, layers = ranks // 64, range(LARGE["layers"])
    stages = {"tokens": 0} | {f"layers.{layer}": layer * 8 // len(layers) for layer in layers}
    strategy = replace(
        strategy_of_example(),
        mesh={"dp": replicas, "tp": 8},
        pipeline=PipelineOptions(degree=8, micro_batches=8, stages=stages),
    )
    with torch.device("meta"):
        model = GPT(**LARGE).bfloat16()
        tokens = torch.zeros(8 * replicas, LARGE["length"], dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = plan_training(strategy, model, (tokens, tokens))
    parts = split_into_stages(found.plan, found.stages, found.meshes)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = f"{peak / 1024:.0f} MB, {(peak - before) / 1024:.0f} of it for the plan"
    return (
        f"{strategy.ranks} ranks, {len(found.plan.graph.nodes)} nodes, {len(parts)} stages: {seconds:.1f} s, {memory}"
    )


if __name__ == "__main__":
    run(main)
