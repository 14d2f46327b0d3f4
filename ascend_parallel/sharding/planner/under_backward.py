"""The plan of least time whose sums of gradients run under the backward.

How much of the sums is left depends on all choices at once. It is the largest of sums of costs, one for each bucket:
of this and the later buckets, less the backward that runs beside them (gradient_sums.py). The search minimises a sum of
costs exactly, so also a mean of these. The candidates are the optima of the mean over the buckets that decided the
candidates before (fictitious play; Robinson 1951, doi:10.2307/1969530), and that of all sums after the backward. Each
is judged by its own time. No plan takes less than the optimum without sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.sharding.planner.elimination import AssignmentProblem, Costs
from ascend_parallel.sharding.planner.gradient_sums import BACKWARD, sums_of_gradients
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.planner.search_tables import Interned
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.tuning.step_time.runtimes import BUCKET_BYTES

# A plan whose time is within this share of the lower bound of all plans is good enough.
CLOSE = 1e-3
MOST_STEPS = 2
# Above so many costs a solution takes seconds: there only the first two candidates are compared.
MOST_COSTS = 2_000_000


class SumsAfter(NamedTuple):
    """Which sums of gradients a candidate pays for.

    last
        The gradients of parameters whose first reader is at this place of the graph, or before it, are summed.
    beside
        The backward of operators before this place takes no time.
    """

    last: int
    beside: int


WITHOUT = SumsAfter(-1, 0)


def plan_under_backward(search: Search) -> ShardingPlan:
    """Return the best candidate, with a lower bound of the time of all plans."""
    sums = _Sums(search)
    place = sums.place

    def candidate(ends: Sequence[SumsAfter]) -> tuple[_Timed, float]:
        chosen, least = search.solved(sums.placed(ends))
        return _Timed(search, sums.alone, chosen), least

    ends = [WITHOUT]
    latest, bound = candidate(ends)
    best = min(latest, candidate([SumsAfter(len(place), 0)])[0], key=lambda each: each.plan.cost)
    small = sum(costs.size for costs in sums.alone.pairs.values()) <= MOST_COSTS
    for _ in range(MOST_STEPS * small):
        if best.plan.cost <= bound * (1 + CLOSE):
            break
        if latest.critical is None:
            ends.append(WITHOUT)
        else:
            first, last = latest.critical
            ends.append(SumsAfter(place[last], place[first]))
        latest, _ = candidate(ends)
        best = min(best, latest, key=lambda each: each.plan.cost)
    return replace(best.plan, bound=None if best.plan.cost <= bound * (1 + 1e-9) else bound)


@dataclass(frozen=True)
class _Sum:
    """The costs of a parameter's sum between the options of two choices: alone, and its share of a bucket.

    first: the place of the parameter's first reader.
    """

    source: str
    target: str
    first: int
    alone: Costs
    in_bucket: Costs


class _Sums:
    """The problem of a search, in which each sum of a gradient is alone, and problems with the sums in buckets."""

    def __init__(self, search: Search) -> None:
        self._search, self.alone = search, search.problem()
        self.place = {name: index for index, name in enumerate(search.graph.nodes)}
        self._sums = list(self._of_parameters())

    def placed(self, ends: Sequence[SumsAfter]) -> AssignmentProblem:
        """Return the mean over `ends` of the problem with its sums in buckets, less the backward beside them."""
        alone = self.alone
        found = AssignmentProblem(dict(alone.sizes), dict(alone.own), dict(alone.pairs))
        for each in self._sums:
            share = fmean(each.first <= end.last for end in ends)
            found.add_pair(each.source, each.target, share * each.in_bucket - each.alone)
        for name, node in self._search.graph.nodes.items():
            share = fmean(self.place[name] < end.beside for end in ends)
            if node.call is not None and share:
                found.own[name] = found.own[name] - share * BACKWARD * self._search.computation(node)
        return found

    def _of_parameters(self) -> Iterator[_Sum]:
        search, interned = self._search, Interned()
        parameters = [value for value in search.readers if search.graph.nodes[value.node].kind == PARAMETER]
        # No bucket has more bytes, unless a parameter has: a share of its seconds is a lower bound.
        bucket = min(BUCKET_BYTES, sum(search.graph.meta(value).nbytes for value in parameters))
        for value in (value for value in parameters if value in search.differentiable):
            meta, first = search.graph.meta(value), min(self.place[name] for name, _ in search.readers[value])
            for source, target, held, read in search.conversions(value):
                alone, in_bucket = interned.result(
                    meta, (held, read), partial(search.edges.sums, meta, held, read, bucket)
                )
                if source != value.node:  # from a shared layout: the sum is in its bucket once, before
                    in_bucket = np.zeros_like(alone)
                yield _Sum(source, target, first, alone, in_bucket)


class _Timed:
    """The plan of some choices, with its sums of gradients under the backward, and the bucket that decides its time."""

    def __init__(self, search: Search, problem: AssignmentProblem, chosen: Mapping[str, int]) -> None:
        plan = search.plan_of(problem, chosen)
        calls = (node for node in search.graph.nodes.values() if node.call is not None)
        took = {node.name: float(search.computation(node)[chosen[node.name]]) for node in calls}
        sums = sums_of_gradients(plan, took, search.readers)
        self.plan = replace(plan, cost=plan.cost - sums.hidden, hidden_sums=sums.hidden)
        self.critical = sums.critical
