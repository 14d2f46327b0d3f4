"""Measure the cost of recording a timeline, and the cost without recording.

    python benchmarks/timeline_cost.py --link 1gbit

Off: nanoseconds of a check, beside the bare call. On: forward and backward of a row-parallel layer, 8 chunks, with and
without recording, in a random order that is the same on both ranks; each timed from a barrier. Medians over the rounds,
and of the difference within a round.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel import Settings, row_linear, timeline
from ascend_parallel.ops.record import MATMUL, RECORDING, compute
from ascend_parallel.tuning.launch.link import End, shaped_link
from ascend_parallel.tuning.launch.ranks import Job, begin_rank, deliver, report, run_ranks

# M, K, N of each rank's matmul: a large one, and the demo's, where the host's share is large.
SHAPES = ((2048, 1024, 1024), (512, 128, 256))


def main() -> None:
    """Measure both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", metavar="RATE", help="a link between the ranks, such as 1gbit (needs root)")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    bare, looking = off()
    print(f"off: {looking - bare:.0f} ns for each matmul ({looking:.0f} with, {bare:.0f} without the look)")
    link: AbstractContextManager[list[End]] = shaped_link(options.link) if options.link else nullcontext([])
    with link as ends:
        arguments = {"rounds": options.rounds}
        job = Job(
            program=(str(Path(__file__).with_name("timeline_cost.py")),),
            arguments=arguments,
            ranks=2,
            limit=600,
            ends=ends,
        )
        results = run_ranks(job, lambda line: None)
    for shape, times in zip(SHAPES, results, strict=True):
        without, difference = (
            median(times["off"]),
            median(b - a for a, b in zip(times["off"], times["on"], strict=True)),
        )
        where, share = options.link or "loopback", difference / without
        print(
            f"on:  M,K,N {','.join(map(str, shape))} over {where}: {without * 1e3:.2f} ms without, "
            f"{difference * 1e6:+.0f} us with ({share:+.1%}), {options.rounds} rounds"
        )


def off() -> tuple[float, float]:
    """Return the ns of a call of an empty function, bare and through `compute`."""

    def nothing(x: object, w: object, out: object) -> None:
        pass

    def best(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=100_000, repeat=15)) / 100_000 * 1e9

    return best(lambda: nothing(1, 2, out=3)), best(lambda: compute(MATMUL, "matmul", nothing, 1, 2, out=3))


def run_rank() -> None:
    """Time every shape."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder, timeline.record(folder):
        deliver([time_shape(shape, job["rounds"]) for shape in SHAPES])
        dist.barrier()
    dist.destroy_process_group()


def time_shape(shape: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """Return the slower rank's seconds of each round, with and without the active recorder."""
    m, k, n = shape
    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    dy, recorder = torch.randn(m, n), RECORDING.recorder
    times: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds + 2):
        names = ["on", "off"]
        random.Random(number).shuffle(names)
        report(f"{shape}: round {number}")
        for name in names:
            RECORDING.recorder = recorder if name == "on" else None
            dist.barrier()
            before = time.perf_counter()
            row_linear(x, weight, group=dist.group.WORLD, settings=Settings(num_chunks=8)).backward(dy)
            took: Any = torch.tensor(time.perf_counter() - before, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= 2:  # warm
                times[name].append(float(took))
    RECORDING.recorder = recorder
    return times


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].endswith("job.json"):
        run_rank()
    else:
        main()
