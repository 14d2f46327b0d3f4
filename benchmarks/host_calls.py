"""Run one rank of benchmarks/host_cost.py: time each operator beside the bare calls that it consists of.

layer     the linear layer's forward, without gradients
torch.op  the operator through torch.library, as a traced model calls it
bare      torch.mm(out=) and torch.distributed by hand, on views made beforehand
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ascend_parallel import ops
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.launch.ranks import begin_rank, deliver, report

# The least rows of a chunk: N chunks have N times as many rows, in equal chunks.
ROWS = 16
WIDTH = 16

Call = Callable[[], object]
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure every operator at every chunk count."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    results: dict[str, dict[int, Times]] = {}
    torch.set_grad_enabled(False)
    for operator, make in (
        ("matmul_all_reduce", all_reduce_calls),
        ("matmul_reduce_scatter", reduce_scatter_calls),
        ("all_gather_matmul", all_gather_calls),
    ):
        results[operator] = {}
        for count in job["chunks"]:
            report(f"{operator}, {count} chunks")
            cases = make(group, count)
            check_chunks(cases, operator, count)
            results[operator][count] = compare(cases, job["rounds"], job["calls"])
    dist.barrier()
    dist.destroy_process_group()
    deliver(results)


def check_chunks(cases: dict[str, Call], operator: str, count: int) -> None:
    """Raise unless the operators run in the same chunks as the bare calls."""
    for who in ("layer", "torch.op"):
        ops.COUNTS.clear()
        cases[who]()
        cut = ops.COUNTS.as_dict()[operator]["chunks"]
        if cut != count:
            raise RuntimeError(f"{operator} as {who} ran in {cut} chunks, not {count}: the comparison would be unfair")


def compare(cases: dict[str, Call], rounds: int, calls: int) -> Times:
    """Time all cases in every round, in a common random order; return the slowest rank's seconds per call."""
    times: Times = {clock: {who: [] for who in cases} for clock in ("wall", "cpu")}
    order = list(cases.items())
    draw = random.Random(0)
    for number in range(-2, rounds):  # two to warm up
        draw.shuffle(order)
        for who, call in order:
            dist.barrier()
            cpu, wall = time.thread_time(), time.perf_counter()
            for _ in range(calls):
                call()
            took = torch.tensor([time.perf_counter() - wall, time.thread_time() - cpu], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= 0:
                times["wall"][who].append(float(took[0]) / calls)
                times["cpu"][who].append(float(took[1]) / calls)
    return times


def all_reduce_calls(group: dist.ProcessGroup, count: int) -> dict[str, Call]:
    """``matmul_all_reduce``: matmul and all-reduce of each chunk, then all waits."""
    x, w = torch.zeros(ROWS * count, WIDTH), torch.zeros(WIDTH, WIDTH)
    y = torch.zeros(ROWS * count, WIDTH)
    chunks = list(zip(x.chunk(count), y.chunk(count), strict=True))

    def bare() -> None:
        works = []
        for x_c, y_c in chunks:
            torch.mm(x_c, w, out=y_c)
            works.append(dist.all_reduce(y_c, group=group, async_op=True))
        for work in works:
            work.wait()

    settings = Settings(num_chunks=count, mode=2)
    return {
        "layer": lambda: row_linear(x, w.t(), group=group, settings=settings),
        "torch.op": lambda: ops.matmul_all_reduce(x, w, group, num_chunks=count),
        "bare": bare,
    }


def reduce_scatter_calls(group: dist.ProcessGroup, count: int) -> dict[str, Call]:
    """``matmul_reduce_scatter`` on gloo: all receives, each chunk's matmuls and sends, then waits and sums."""
    ranks, rank = group.size(), group.rank()
    peers = [peer for peer in range(ranks) if peer != rank]
    x, w = torch.zeros(ranks * ROWS * count, WIDTH), torch.zeros(WIDTH, WIDTH)
    chunks = []
    for x_r_c in x.view(ranks, -1, WIDTH).chunk(count, dim=1):
        x_r = x_r_c.unbind()
        partial, received = torch.zeros(ranks, ROWS, WIDTH).unbind(), torch.zeros(ranks, ROWS, WIDTH).unbind()
        parts = [partial[peer] if peer == rank else received[peer] for peer in range(ranks)]
        chunks.append((list(zip(x_r, partial, strict=True)), partial, received, parts, torch.zeros(ROWS, WIDTH)))

    def bare() -> None:
        works = [[dist.irecv(received[p], group=group, group_src=p) for p in peers] for _, _, received, _, _ in chunks]
        for index, (slices, partial, _, _, _) in enumerate(chunks):
            for x_c, y_c in slices:
                torch.mm(x_c, w, out=y_c)
            works[index] += [dist.isend(partial[p], group=group, group_dst=p) for p in peers]
        for index, (_, _, _, parts, out) in enumerate(chunks):
            for work in works[index]:
                assert work is not None
                work.wait()
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

    settings = Settings(num_chunks=count, mode=2)
    return {
        "layer": lambda: row_linear(x, w.t(), group=group, settings=settings, sequence_parallel=True),
        "torch.op": lambda: ops.matmul_reduce_scatter(x, w, group, num_chunks=count),
        "bare": bare,
    }


def all_gather_calls(group: dist.ProcessGroup, count: int) -> dict[str, Call]:
    """``all_gather_matmul``: all gathers, the own rows' matmul, then each chunk's wait and matmuls."""
    ranks, rank = group.size(), group.rank()
    x, w = torch.zeros(ROWS * count, WIDTH), torch.zeros(WIDTH, WIDTH)
    gathered, y = torch.zeros(ranks, ROWS * count, WIDTH), torch.zeros(ranks, ROWS * count, WIDTH)
    chunks = []
    for x_c, gathered_r_c, y_r_c in zip(x.chunk(count), gathered.chunk(count, 1), y.chunk(count, 1), strict=True):
        others = [(gathered_r_c[peer], y_r_c[peer]) for peer in range(ranks) if peer != rank]
        chunks.append((x_c, list(gathered_r_c.unbind()), others))
    own = y[rank]

    def bare() -> None:
        works = [dist.all_gather(views, x_c, group=group, async_op=True) for x_c, views, _ in chunks]
        torch.mm(x, w, out=own)
        for work, (_, _, others) in zip(works, chunks, strict=True):
            work.wait()
            for x_c, y_c in others:
                torch.mm(x_c, w, out=y_c)

    settings = Settings(num_chunks=count, mode=2)
    return {
        "layer": lambda: column_linear(x, w.t(), group=group, settings=settings, sequence_parallel=True),
        "torch.op": lambda: ops.all_gather_matmul(x, w, group, num_chunks=count),
        "bare": bare,
    }


if __name__ == "__main__":
    main()
