"""The plan of least time whose sums of gradients run under the backward.

How much of the sums is left depends on all choices at once. It is the largest of sums of costs, one for each bucket:
of this and the later buckets, less the backward that runs beside them (gradient_sums.py). The search minimises a sum of
costs exactly, so also a mean of these. The candidates are the optima of the mean over the buckets that decided the
candidates before (fictitious play; Robinson 1951, doi:10.2307/1969530), and that of all sums after the backward. Each
is judged by its own time. No plan takes less than the optimum without sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascend_parallel.sharding.planner.elimination import AssignmentProblem
from ascend_parallel.sharding.planner.gradient_sums import sums_of_gradients
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan

# A plan whose time is within this share of the lower bound of all plans is good enough.
CLOSE = 1e-3
MOST_STEPS = 2
# Above so many costs a solution takes seconds: there only the first two candidates are compared.
MOST_COSTS = 2_000_000
Cut = tuple[int, int]
"""Of `Search.with_sums`."""
WITHOUT: Cut = (-1, 0)


def plan_under_backward(search: Search) -> ShardingPlan:
    """Return the best candidate, with a lower bound of the time of all plans."""
    problem, place = search.problem(), {name: index for index, name in enumerate(search.graph.nodes)}

    def candidate(cuts: Sequence[Cut]) -> tuple[_Timed, float]:
        chosen, least = search.solved(search.with_sums(problem, cuts))
        return _Timed(search, problem, chosen), least

    cuts = [WITHOUT]
    latest, bound = candidate(cuts)
    best = min(latest, candidate([(len(place), 0)])[0], key=lambda each: each.plan.cost)
    small = sum(costs.size for costs in problem.pairs.values()) <= MOST_COSTS
    for _ in range(MOST_STEPS * small):
        if best.plan.cost <= bound * (1 + CLOSE):
            break
        cuts.append(WITHOUT if latest.critical is None else (place[latest.critical[1]], place[latest.critical[0]]))
        latest, _ = candidate(cuts)
        best = min(best, latest, key=lambda each: each.plan.cost)
    return replace(best.plan, bound=None if best.plan.cost <= bound * (1 + 1e-9) else bound)


class _Timed:
    """The plan of some choices, with its sums of gradients under the backward, and the bucket that decides its time."""

    def __init__(self, search: Search, problem: AssignmentProblem, chosen: Mapping[str, int]) -> None:
        plan = search.plan_of(problem, chosen)
        sums = sums_of_gradients(plan)
        self.plan = replace(plan, cost=plan.cost - sums.hidden, hidden_sums=sums.hidden)
        self.critical = sums.critical
