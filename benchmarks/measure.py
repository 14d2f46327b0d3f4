"""One rank of benchmarks/linears.py: times every case, paired and interleaved.

Each round runs all cases of a cell once, in a random order that is the same on every rank. A barrier precedes every
timed call, and the call's time is that of the slowest rank. A disturbance then hits all cases of its round, and the
comparison within rounds cancels it. Rounds with busy other programs are marked.
"""

from __future__ import annotations

import gc
import os
import random
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Call, Cases, Cell

from ascend_parallel.patches.megatron.testing import megatron_on_cpu, start_model_parallel, stop_model_parallel
from ascend_parallel.tuning.launch.ranks import begin_rank, deliver, report

MIN_ROUNDS = 3
COLLECTIVE_LIMIT = timedelta(seconds=120)

STAT = Path("/proc/stat")

Times = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Round:
    """The times of one round, equal on all ranks.

    times
        The slowest rank's seconds of each case, in the order in which the cases ran.
    others
        Number of processors that other programs kept busy; the network's time in the operating system is not counted.
    """

    times: list[float]
    elapsed: float
    others: float


def main() -> None:
    """Measure every cell of the job."""
    job = begin_rank()
    torch.set_num_threads(1)
    report("starting the ranks")
    dist.init_process_group("gloo", timeout=COLLECTIVE_LIMIT)
    with megatron_on_cpu():
        start_model_parallel(dist.get_world_size())
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        cells = [Cell(**cell) for cell in job["cells"]]
        share = job["seconds"] / len(cells)
        measured = []
        for index, cell in enumerate(cells):
            title = f"{index + 1}/{len(cells)}  {cell.mode} [{cell.m}, {cell.k}] x [{cell.k}, {cell.n}]"
            measured.append(measure_cell(cell, job, group, share, title))
        dist.barrier()
        stop_model_parallel()
    deliver({"cells": measured, "versions": versions()})


def measure_cell(
    cell: Cell, job: dict[str, Any], group: dist.ProcessGroup, seconds: float, title: str
) -> dict[str, Any]:
    """Time the cases of one cell, until `job["repeats"]` rounds were quiet or `seconds` are over."""
    start = time.perf_counter()
    report(f"{title}: checking")
    cases = Cases(cell, getattr(torch, job["dtype"]), group)
    cases.check(job["chunks"])
    passes = cases.passes(job["chunks"])
    calls = [(name, case) for name in passes for case in passes[name]]
    run_round(cases, passes, calls, group, start)  # warm-up
    times: Times = {name: {case: [] for case in passes[name]} for name in passes}
    others: list[float] = []
    quiet, elapsed = 0, 0.0
    while quiet < job["repeats"] and (elapsed < seconds or len(others) < MIN_ROUNDS):
        random.Random(f"{cell}{len(others)}").shuffle(calls)
        finished = run_round(cases, passes, calls, group, start)
        for (name, case), value in zip(calls, finished.times, strict=True):
            times[name][case].append(value)
        others.append(finished.others)
        quiet += finished.others <= job["quiet"]
        elapsed = finished.elapsed
        report(f"{title}: {len(others)} rounds, {quiet} of {job['repeats']} quiet; {elapsed:.0f} of {seconds:.0f} s")
    return {"passes": times, "others": others}


def run_round(
    cases: Cases,
    passes: dict[str, dict[str, Call]],
    order: list[tuple[str, str]],
    group: dist.ProcessGroup,
    start: float,
) -> Round:
    """Run every case once."""
    took = []
    gc.collect()
    gc.disable()
    own, all_programs, began = time.process_time(), busy_seconds(), time.perf_counter()
    for name, case in order:
        call = passes[name][case]
        cases.forget_gradients()
        dist.barrier(group)
        before = time.perf_counter()
        kept = call()
        took.append(time.perf_counter() - before)
        del kept  # freed outside the timed part for every case
    end = time.perf_counter()
    own, all_programs = time.process_time() - own, busy_seconds() - all_programs
    gc.enable()
    slowest = torch.tensor([*took, all_programs / (end - began), end - start], dtype=torch.float64)
    ours = torch.tensor(own / (end - began), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(ours, group=group)
    *times, everybody, elapsed = slowest.tolist()
    return Round(times=times, elapsed=elapsed, others=max(0.0, everybody - float(ours)))


def busy_seconds() -> float:
    """Return the processor seconds used by programs on this machine, and withheld by its host."""
    user, nice, system, _idle, _wait, _irq, _softirq, steal, *_ = map(int, STAT.read_text().split("\n")[0].split()[1:])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str]:
    """Return the versions and settings of the measurement."""
    import megatron.core

    return {
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "cpus": str(len(os.sched_getaffinity(0))),
    }


if __name__ == "__main__":
    main()
