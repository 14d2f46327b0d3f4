"""The same least sum as an integer program, by scipy's HiGHS: the referee, and the way where tables would be too large.

One 0/1 variable for each option of a choice, one number in [0, 1] for each pair of options that two choices' costs
depend on, whose sums over either side are that side's options (the local polytope; Wainwright and Jordan 2008,
doi:10.1561/2200000001). Without the 0/1 it is tight on trees, which a model's forward nearly is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from ascend_parallel.sharding.planner.elimination import AssignmentProblem


@dataclass(frozen=True)
class Optimum:
    """The options found, their cost, and what no options can cost less than."""

    chosen: dict[str, int]
    cost: float
    bound: float


def optimum(problem: AssignmentProblem, *, seconds: float = 60.0) -> Optimum:
    """Solve the integer program; `bound` is below `cost` where `seconds` were not enough.

    Raises `TimeoutError` if no options at all were found.
    """
    offset = dict(zip(problem.sizes, np.cumsum([0, *problem.sizes.values()]), strict=False))
    options = sum(problem.sizes.values())
    costs = [problem.own[name] for name in problem.sizes] + [pair.ravel() for pair in problem.pairs.values()]
    rows, columns, signs, right = [], [], [], []
    row, column = 0, options
    for name, size in problem.sizes.items():
        rows += [np.full(size, row)]
        columns += [np.arange(offset[name], offset[name] + size)]
        signs += [np.ones(size)]
        right.append(1.0)
        row += 1
    for (first, second), pair in problem.pairs.items():
        left, across = len(pair), len(pair[0])
        own = column + np.arange(pair.size).reshape(left, across)
        for name, count, which in ((first, left, own), (second, across, own.T)):
            rows += [np.repeat(np.arange(row, row + count), which.shape[1]), np.arange(row, row + count)]
            columns += [which.ravel(), np.arange(offset[name], offset[name] + count)]
            signs += [np.ones(pair.size), -np.ones(count)]
            right += [0.0] * count
            row += count
        column += pair.size
    matrix = sparse.csr_matrix((np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))), (row, column))
    whole = np.concatenate(costs)
    scale = float(np.abs(whole).max()) or 1.0  # HiGHS has absolute tolerances
    found = milp(
        whole / scale,
        constraints=LinearConstraint(matrix, right, right),
        bounds=Bounds(0, 1),
        integrality=np.concatenate([np.ones(options), np.zeros(column - options)]),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise TimeoutError(f"HiGHS found nothing within {seconds:g} s for {options} options of {len(offset)} choices")
    chosen = {name: int(np.argmax(found.x[offset[name] :][:size])) for name, size in problem.sizes.items()}
    bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
    return Optimum(chosen, problem.cost(chosen), min(float(bound) * scale, problem.cost(chosen)))
