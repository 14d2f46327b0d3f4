"""Run one rank of benchmarks/fused.py: time every case of a shape, paired and interleaved.

    shm       the shared-memory kernel
    start     the same through `start_...` or `run_...`, with the choice of a kernel
    serial    the matmul, then gloo's collective
    chunked   four chunks, if there are enough rows
    matmul    the whole matmul alone
    gloo      the collective alone, on existing rows: an all-reduce in place
    exchange  the kernel, with an allocated result
    product   the whole matmul, with an allocated result: exchange - product compares with gloo
    copy      a copy of as many bytes as the collective's tensor

Each round runs all cases once, in a random order that is the same on all ranks. A case is timed from a barrier, with
enough calls in a row for a measurable time; its time is that of the slowest rank.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, start
from measure import busy_seconds

from ascend_parallel.ops import chunked, reference, shm
from ascend_parallel.ops.operators import run_all_gather_matmul, start_matmul_all_reduce, start_matmul_reduce_scatter
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.launch.ranks import begin_rank, deliver, report

CHUNKS = 4
MIN_ROUNDS = 5
SHORTEST = 2e-3  # seconds that the calls in a row take at least
MOST_CALLS = 200
FUSED = Settings(fused=True)
COLLECTIVES = {
    "matmul_all_reduce": ALL_REDUCE,
    "matmul_reduce_scatter": REDUCE_SCATTER,
    "all_gather_matmul": ALL_GATHER,
}

Call = Callable[[], object]


def main() -> None:
    """Measure every cell of the job."""
    job = begin_rank()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    group = dist.group.WORLD
    assert group is not None
    if reason := shm.reach(group):
        raise RuntimeError(f"no shared memory here: {reason}")
    cells = job["cells"]
    measured = []
    for index, cell in enumerate(cells):
        title = f"{index + 1}/{len(cells)}  {cell['operator']} {cell['m']},{cell['k']},{cell['n']}"
        measured.append(measure(cell, job, group, title))
    dist.barrier()
    deliver({"cells": measured, "torch": torch.__version__})
    dist.destroy_process_group()


def measure(cell: dict[str, Any], job: dict[str, Any], group: dist.ProcessGroup, title: str) -> dict[str, Any]:
    """Time the cases of one cell until enough rounds were quiet or the cell's share of the time is over."""
    moved, calls = cases(cell, getattr(torch, job["dtype"]), group)
    inner = {name: how_often(call, group) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    others: list[float] = []
    order = list(calls)
    began, elapsed, quiet, share = time.perf_counter(), 0.0, 0, job["seconds"] / len(job["cells"])
    while quiet < job["rounds"] and (elapsed < share or len(others) < MIN_ROUNDS):
        random.Random(f"{cell}{len(others)}").shuffle(order)
        gc.collect()
        own, everybody, start_of_round = time.process_time(), busy_seconds(), time.perf_counter()
        took = [timed(calls[name], inner[name], group) for name in order]
        end = time.perf_counter()
        busy = torch.tensor((time.process_time() - own) / (end - start_of_round), dtype=torch.float64)
        dist.all_reduce(busy, group=group)
        used = (busy_seconds() - everybody) / (end - start_of_round) - float(busy)
        slowest = torch.tensor([*took, used, end - began], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        *took, used, elapsed = slowest.tolist()
        for name, value in zip(order, took, strict=True):
            times[name].append(value)
        others.append(max(0.0, used))
        quiet += used <= 0.1
        report(f"{title}: {len(others)} rounds, {quiet} of {job['rounds']} quiet")
    return {"times": times, "others": others, **moved}


def timed(call: Call, count: int, group: dist.ProcessGroup) -> float:
    """Return seconds per call."""
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(count):
        kept = call()
    took = (time.perf_counter() - begin) / count
    del kept
    return took


def how_often(call: Call, group: dist.ProcessGroup) -> int:
    """Return the number of calls in a row that take `SHORTEST`, equal on all ranks; the first calls warm up."""
    timed(call, 2, group)
    took = torch.tensor(timed(call, 3, group))
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return max(1, min(MOST_CALLS, round(SHORTEST / float(took))))


def cases(cell: dict[str, Any], dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, Call]]:
    """Return the bytes of the collective's tensor, the bytes that shm moves, and the calls."""
    operator, m, k, n = cell["operator"], cell["m"], cell["k"], cell["n"]
    ranks = group.size()
    gathers = operator == "all_gather_matmul"
    draw = torch.Generator().manual_seed(group.rank())
    whole = torch.randn(m, k, generator=draw).to(dtype)
    x, w = whole[: m // ranks] if gathers else whole, torch.randn(k, n, generator=draw).to(dtype)
    rows = torch.zeros(m, k if gathers else n, dtype=dtype)
    sizes = split_rows(m if operator == "matmul_all_reduce" else m // ranks, CHUNKS)
    place, product = torch.zeros_like(rows), torch.zeros(m, n, dtype=dtype)
    y = torch.zeros(m // ranks if operator == "matmul_reduce_scatter" else m, n, dtype=dtype)
    results = (y, place) if gathers else (y,)
    calls: dict[str, Call] = {
        "shm": lambda: run(shm, operator, x, w, group, ()),
        "start": lambda: through_choice(operator, x, w, group),
        "serial": lambda: run(reference, operator, x, w, group, ()),
        "chunked": lambda: run(chunked if len(sizes) > 1 else reference, operator, x, w, group, sizes),
        "matmul": lambda: torch.mm(whole, w),
        "gloo": lambda: start(COLLECTIVES[operator], rows, 1, group)(),
        "exchange": lambda: getattr(shm._SHARED[group], operator)(x, w, *results, shm.TIME_LIMIT),
        "product": lambda: torch.mm(whole, w, out=product),
        "copy": lambda: place.copy_(rows),
    }
    check(calls, cell)
    return {"bytes": rows.nbytes, "moved": moved(operator, ranks, rows.nbytes)}, calls


def run(kernel: Any, operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Any) -> Any:
    """Run a kernel's operator to its end."""
    result = getattr(kernel, operator)(x, w, group, sizes)
    return result[0] if isinstance(result, tuple) else result.wait()


def through_choice(operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Run an operator as `linear` does."""
    if operator == "all_gather_matmul":
        return run_all_gather_matmul(x, w, group, FUSED)[0]
    begin = start_matmul_all_reduce if operator == "matmul_all_reduce" else start_matmul_reduce_scatter
    return begin(x, w, group, FUSED).wait()


def moved(operator: str, ranks: int, size: int) -> int:
    """Return the bytes that a rank reads and writes to exchange `size` bytes, without the matmul's."""
    if operator == "all_gather_matmul":  # its own rows to the stage; all from the stages to the gathered ones
        return 2 * size // ranks + 2 * size
    if operator == "matmul_reduce_scatter":  # its part of every stage, and the result
        return size + size // ranks
    if ranks == 2:  # both stages, and the result
        return 3 * size
    return 3 * size + size // ranks  # its part of every stage, and the sum; all sums, and the result


def check(calls: dict[str, Call], cell: dict[str, Any]) -> None:
    """Raise unless all calls compute the same result."""
    expected = calls["serial"]()
    assert isinstance(expected, torch.Tensor)
    for name in ("shm", "start", "chunked"):
        got = calls[name]()
        assert isinstance(got, torch.Tensor)
        error = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error < max(1e-4, 8 * torch.finfo(got.dtype).eps):
            raise RuntimeError(f"{cell}: {name} is off by {error:.2g}")


if __name__ == "__main__":
    main()
