"""Time a training step of a GPT on 8 ranks (data 2 x tensor 2 x pipeline 2): torch's parts, by hand, by a strategy.

    python benchmarks/strategy.py                   about nine minutes, on gloo over the loopback
    python benchmarks/strategy.py --link 1gbit      a link for every rank; needs root
    python benchmarks/strategy.py --plan 8192       plans the same strategy for 8192 ranks, without processes

fp32, AdamW, 1F1B with 4 micro-batches, tensor parallelism without sequence parallelism; a step is forward, backward,
the gradients' sums and the optimizer. Each case runs in separate processes, so that no other threads disturb it. All
cases run in several turns, in random order. Before the timing, the losses are compared with those of one card.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from strategy_cases import CASES, GPT, RANKS, TORCH, Step, strategy_of_example

from ascend_parallel.training import PipelineOptions
from ascend_parallel.training.pipeline.split_plan import split_into_stages
from ascend_parallel.training.training_plan import plan_training
from ascend_parallel.tuning.launch.link import LinkError, shaped_link
from ascend_parallel.tuning.launch.ranks import Job, RankError, begin_rank, deliver, report, run_ranks

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 4, 256, 8, 512, 128, 16
LR, CHECKED, WARM_UP = 1e-3, 3, 1
TOLERANCE = 1e-4  # for fp32
LIMIT = 600
LARGE = {"layers": 32, "width": 4096, "heads": 32, "vocabulary": 50304, "length": 2048}


def main() -> int:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--link", metavar="RATE", help="rate of each rank's link, such as 1gbit (needs root)")
    parser.add_argument("--rounds", type=int, default=10, help="steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--plan", type=int, metavar="RANKS", help="only plan for this number of ranks (a multiple of 64)"
    )
    options = parser.parse_args()
    if options.plan:
        print(planned(options.plan))
        return 0
    link = shaped_link(options.link, RANKS) if options.link else nullcontext([])
    with link as ends, Console(stderr=True).status("measuring") as status:
        times: dict[str, list[float]] = {name: [] for name in CASES}
        for turn in range(options.turns):
            for name in random.Random(turn).sample(list(CASES), len(CASES)):
                arguments = {"rounds": options.rounds, "case": name}
                job = Job(program=(str(Path(__file__)),), arguments=arguments, ranks=RANKS, limit=LIMIT, ends=ends)
                line = f"turn {turn + 1} of {options.turns}, {name}: "
                times[name] += run_ranks(job, lambda progress, line=line: status.update(line + progress))
    print(f"| medians of {options.turns} x {options.rounds} steps | ms | torch's parts / case |\n|---|---|---|")
    for name, its in times.items():
        print(f"| {name} | {1e3 * median(its):.0f} | {median(times[TORCH]) / median(its):.2f} |")
    return 0


def rank() -> None:
    """Time a case on this rank."""
    job = begin_rank()
    name = job["case"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    report("one card")
    right = losses_of_one_card()
    report("its losses")
    step = CASES[name](model_of_run(), batch_of(0), LR)
    check(name, step, right)
    times, batch = [], batch_of(CHECKED)
    for index in range(WARM_UP + job["rounds"]):
        report(f"step {index + 1} of {WARM_UP + job['rounds']}")
        took = timed(step, batch)
        times += [took] if index >= WARM_UP else []
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    deliver(slowest.tolist())
    step.close()
    dist.barrier()
    dist.destroy_process_group()


def losses_of_one_card() -> list[float]:
    """Return the losses of one card's first steps; only rank 0 computes them."""
    losses = torch.zeros(CHECKED, dtype=torch.float64)
    if dist.get_rank() == 0:
        model = model_of_run()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        for index in range(CHECKED):
            loss = model(*batch_of(index))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[index] = loss.detach()
    dist.broadcast(losses, 0)
    return losses.tolist()


def check(name: str, step: Step, right: list[float]) -> None:
    """Raise unless the losses of the first steps equal those of one card."""
    losses = [step(*batch_of(index)) for index in range(len(right))]
    if any(abs(loss - expected) > TOLERANCE * expected for loss, expected in zip(losses, right, strict=True)):
        raise ValueError(f"{name}: losses {losses}, one card has {right}")


def timed(step: Step, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the seconds of one step on this rank."""
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    step(*batch)
    took = time.perf_counter() - start
    gc.enable()
    return took


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
    try:
        sys.exit(rank() if sys.argv[-1].endswith("job.json") else main())
    except (LinkError, RankError, ValueError) as error:
        sys.exit(f"strategy.py: {error}")
