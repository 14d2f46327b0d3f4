"""The part of a report that runs on the ranks: the operators with every kernel, against float64 and in bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.diagnostics.doctor.trial import (
    float64_result,
    operands,
    problem_on,
    relative_error,
    run_kernel,
    try_experts,
)
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.problem import OPERATORS, Problem
from ascend_parallel.ops.registry import FUSED, KERNELS
from ascend_parallel.process_groups.consistency import exchange
from ascend_parallel.text import dtype_name
from ascend_parallel.tuning.launch.devices import device_of
from ascend_parallel.tuning.launch.ranks import report

SERIAL = "reference"


def measure(
    group: dist.ProcessGroup, dtypes: list[str], shape: tuple[int, int, int], chunks: list[int]
) -> dict[str, Any]:
    """Return the errors and bits of every kernel and chunk count, and the outcome of an exchange of experts.

    shape: rows of a rank, K and N. error: the largest on any rank, a share of the largest magnitude of the result.
    bits: whether the results of all ranks equal the serial path's bit for bit. again: whether a second call
    returned the same bits.
    """
    device, found = device_of(group), []
    for dtype in dtypes:
        for operator in OPERATORS:
            report(f"{operator} {dtype}")
            problem = problem_on(group, operator, *shape, getattr(torch, dtype), device)
            found += _of_problem(problem, group, chunks)
    return {"kernels": found, "experts": try_experts(group, device)}


def _of_problem(problem: Problem, group: dist.ProcessGroup, chunks: list[int]) -> list[dict[str, Any]]:
    x, w = operands(problem, 1)
    truth = float64_result(problem, x, w, group.rank())
    serial = run_kernel(SERIAL, problem, x, w, group, 1)
    found = []
    for name, kernel in KERNELS.items():
        row = {"operator": problem.operator, "dtype": dtype_name(problem.dtype), "kernel": name}
        if (refusal := kernel.supports(problem)) is not None:
            found.append({**row, "refused": refusal})
            continue
        for count in [1] if name in (SERIAL, *FUSED) else chunks:
            y, again = (run_kernel(name, problem, x, w, group, count) for _ in range(2))
            own = {
                "error": relative_error(y, truth),
                "bits": torch.equal(y, serial),
                "again": torch.equal(y, again),
            }
            found.append({**row, "chunks": count, **_of_all_ranks(own, group)})
    return found


def _of_all_ranks(own: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    by_rank = exchange(group, "the comparison of operators", own, CollectiveError).values()
    error = max(rank["error"] for rank in by_rank)
    return {"error": error, **{name: all(rank[name] for rank in by_rank) for name in ("bits", "again")}}
