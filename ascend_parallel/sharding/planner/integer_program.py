"""Solves an `AssignmentProblem` as an integer program, by scipy's HiGHS: where elimination's tables would be too large.

Tests also compare elimination with this solution. Variables: 0 or 1 for each option of a choice, and a number in [0, 1]
for each pair of options of two connected choices. The sums of a pair's numbers over either choice equal the variables
of the other choice (the local polytope; Wainwright and Jordan 2008, doi:10.1561/2200000001). The relaxation without
the 0/1 condition is tight on trees, and a model's forward is nearly a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp
except ModuleNotFoundError as error:  # of the extra [sharding]; overlap alone does not need it
    raise ModuleNotFoundError(
        "ascend_parallel.sharding needs scipy, of its extra [sharding]: pip install scipy"
    ) from error

from ascend_parallel.sharding.planner.elimination import AssignmentProblem


@dataclass(frozen=True)
class Optimum:
    """The chosen options (None: none was found), their cost, and a lower bound of the cost of any options."""

    chosen: dict[str, int] | None
    cost: float
    bound: float


def optimum(problem: AssignmentProblem, *, nodes: int | None = None) -> Optimum:
    """Return the optimum of the integer program; `bound` is below `cost` if `nodes` were not enough to prove it.

    nodes: of HiGHS's tree, at most. A limit in seconds would let the ranks of a job find different plans.
    """
    offset = dict(zip(problem.sizes, np.cumsum([0, *problem.sizes.values()]), strict=False))
    options = sum(problem.sizes.values())
    costs = [problem.own[name] for name in problem.sizes] + [pair.ravel() for pair in problem.pairs.values()]
    rows: list[NDArray[Any]] = []
    columns: list[NDArray[Any]] = []
    signs: list[NDArray[Any]] = []
    right: list[float] = []
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
        for name, count, variables in ((first, left, own), (second, across, own.T)):
            rows += [np.repeat(np.arange(row, row + count), variables.shape[1]), np.arange(row, row + count)]
            columns += [variables.ravel(), np.arange(offset[name], offset[name] + count)]
            signs += [np.ones(pair.size), -np.ones(count)]
            right += [0.0] * count
            row += count
        column += pair.size
    matrix = sparse.csr_matrix((np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))), (row, column))
    whole = np.concatenate(costs)
    possible = np.isfinite(whole)
    whole = np.where(possible, whole, 0.0)
    scale = float(np.abs(whole).max()) or 1.0  # HiGHS has absolute tolerances
    solution = milp(
        whole / scale,
        constraints=LinearConstraint(matrix, right, right),
        bounds=Bounds(0, possible.astype(float)),
        integrality=np.concatenate([np.ones(options), np.zeros(column - options)]),
        options={"mip_rel_gap": 0.0, **({} if nodes is None else {"node_limit": nodes})},
    )
    bound = solution.fun if solution.mip_dual_bound is None else solution.mip_dual_bound
    least = -float("inf") if bound is None else float(bound) * scale
    if solution.x is None:
        return Optimum(None, float("inf"), least)
    chosen = {name: int(np.argmax(solution.x[offset[name] :][:size])) for name, size in problem.sizes.items()}
    cost = problem.cost(chosen)
    return Optimum(chosen, cost, min(least, cost))
