"""Remove options that no best solution has, by lower bounds from message passing.

Where many choices read the same tensors (the steps of a scan), the tables of the elimination would be too large for all
options, and are small for the few that can be in a best solution. Sequential tree-reweighted message passing (TRW-S;
Kolmogorov 2006, doi:10.1109/TPAMI.2006.200) gives a lower bound of all solutions, and for each option how much the
bound grows with it. An option whose bound is above the cost of a known solution is in no better one.

The better the known solution, the more options go. A few options of each choice beside the chosen ones are a problem
of its own, which elimination solves, and its solution is at least as good (fusion moves; Lempitsky and others 2010,
doi:10.1109/TPAMI.2009.143).

The work is limited by counts, never by a clock: all ranks of a job, however busy their machines, find the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ascend_parallel.sharding.planner.elimination import AssignmentProblem, Costs, TooWideError, solve
from ascend_parallel.sharding.planner.integer_program import optimum

# Rounds of messages at most, and between two attempts to find a better solution and to remove options.
ROUNDS, EVERY = 200, 5
# Numbers that all messages may read, about a second for 100 million: few rounds for a large problem.
MOST_READ = 2_500_000_000
# The share of the gap between solution and bound that each attempt must close; else the attempts end.
GAIN = 1e-3
# Options of each choice among which a solution is looked for: as many of these as `ATTEMPT` sums allow, or one.
TRIED = (4, 3, 2)
# Options of a choice that are tried beside the chosen one, and how many at a time.
BESIDE, AT_A_TIME = 24, 3
# HiGHS gets a rest of at most as many costs between options, and as many nodes of its tree: some seconds.
MOST_LEFT, MOST_NODES = 10_000, 1
# Of the costs: differences below this are rounding.
ROUNDING = 1e-9
# Sums for which the remaining problem is eliminated at once, and those for an attempt to find a better solution.
SMALL, ATTEMPT = 30_000_000, 1_000_000


@dataclass(frozen=True)
class PartialSolution:
    """A solution and a lower bound of all; equal if it is proven to be best, else the problem that remains.

    options
        For each choice the options that may be in a better solution.
    """

    chosen: Mapping[str, int]
    cost: float
    bound: float
    options: Mapping[str, npt.NDArray[np.int64]]


def solved_by_pruning(problem: AssignmentProblem) -> PartialSolution:
    """Return the best solution, or the best that the limits of work allow, with a lower bound of all.

    What pruning leaves open goes to HiGHS if it is small.
    """
    found = pruned(problem)
    left = restricted(problem, found.options)
    size = sum(costs.size for costs in left.pairs.values())
    if found.bound == found.cost or size > MOST_LEFT:
        return found
    rest = optimum(left, nodes=MOST_NODES)
    best, cost = dict(found.chosen), found.cost
    if rest.chosen and rest.cost < cost:
        best, cost = {name: int(found.options[name][place]) for name, place in rest.chosen.items()}, rest.cost
    return replace(found, chosen=best, cost=cost, bound=min(cost, max(found.bound, rest.bound)))


def pruned(problem: AssignmentProblem) -> PartialSolution:
    """Return the best solution that was found, and what may be better."""
    problem, remaining = _finite(problem), {name: np.arange(size) for name, size in problem.sizes.items()}
    chosen, cost, bound = dict[str, int](), float("inf"), -float("inf")
    messages, read, before = _Messages(problem), 0, float("inf")
    next_, pause = 0, EVERY
    for round_ in range(1, ROUNDS + 1):
        messages.forward()
        bound = max(bound, messages.backward())
        read += messages.size
        if round_ % EVERY and read <= MOST_READ:
            continue
        excess = messages.excess()
        found = _near_solution(problem, remaining, excess)
        if found[1] < cost:
            chosen, cost = found
        if round_ >= next_:  # where nothing is gained, later and later
            better = _improved(problem, remaining, chosen, cost, excess)
            pause = EVERY if better[1] < cost else 2 * pause
            (chosen, cost), next_ = better, round_ + pause
        slack = ROUNDING * abs(cost)
        if cost <= bound + slack:
            return PartialSolution(chosen, cost, cost, remaining)
        keep = {name: _kept(bound, numbers, cost, slack) for name, numbers in excess.items()}
        remaining = {name: options[keep[name]] for name, options in remaining.items()}
        messages.restrict(keep)
        try:
            exact = _solution(problem, remaining, {}, SMALL)
        except TooWideError:
            open_ = cost - bound
            if read > MOST_READ or open_ > before * (1 - GAIN):
                break
            before = open_
            continue
        chosen, cost = min((chosen, cost), exact, key=lambda pair: pair[1])
        return PartialSolution(chosen, cost, cost, remaining)
    return PartialSolution(chosen, cost, bound, remaining)


def _finite(problem: AssignmentProblem) -> AssignmentProblem:
    """Return the problem with a cost above that of every finite solution in place of infinite costs."""
    tables = [*problem.own.values(), *problem.pairs.values()]
    if all(np.isfinite(costs).all() for costs in tables):
        return problem
    high = 1.0 + 2 * sum(float(np.abs(costs[np.isfinite(costs)]).max(initial=0.0)) for costs in tables)
    own = {name: np.where(np.isfinite(costs), costs, high) for name, costs in problem.own.items()}
    pairs = {names: np.where(np.isfinite(costs), costs, high) for names, costs in problem.pairs.items()}
    return AssignmentProblem(problem.sizes, own, pairs)


def restricted(problem: AssignmentProblem, options: Mapping[str, npt.NDArray[np.int64]]) -> AssignmentProblem:
    """Return the problem with only these options of each choice."""
    part = AssignmentProblem()
    for name, costs in problem.own.items():
        part.add(name, costs[options[name]])
    for (first, second), costs in problem.pairs.items():
        part.add_pair(first, second, costs[np.ix_(options[first], options[second])])
    return part


def _kept(bound: float, excess: Costs, cost: float, slack: float) -> npt.NDArray[np.int64]:
    kept = np.flatnonzero(bound + excess <= cost + slack)
    return kept if len(kept) else np.array([int(excess.argmin())])


def _near_solution(
    problem: AssignmentProblem, remaining: Mapping[str, npt.NDArray[np.int64]], excess: Mapping[str, Costs]
) -> tuple[dict[str, int], float]:
    """Return the best solution among the few options of least excess of each choice, and its cost."""
    order = {name: np.argsort(excess[name], kind="stable") for name in remaining}
    for tried in TRIED:
        try:
            return _solution(problem, remaining, {name: np.sort(near[:tried]) for name, near in order.items()}, ATTEMPT)
        except TooWideError:
            continue
    return _solution(problem, remaining, {name: near[:1] for name, near in order.items()})


def _improved(
    problem: AssignmentProblem,
    remaining: Mapping[str, npt.NDArray[np.int64]],
    chosen: dict[str, int],
    cost: float,
    excess: Mapping[str, Costs],
) -> tuple[dict[str, int], float]:
    """Return a solution at least as good: for each choice some more options are tried beside the chosen one.

    First those of least excess, then those that cost least beside what the other choices have chosen.
    """
    for by_excess in (True, False):
        for start in range(0, BESIDE, AT_A_TIME):
            near = excess if by_excess else _beside(problem, remaining, chosen)
            places = {name: np.argsort(near[name], kind="stable")[start : start + AT_A_TIME] for name in remaining}
            tried = {
                name: np.union1d(of_name[places[name]], [chosen[name]]).astype(np.int64)
                for name, of_name in remaining.items()
            }
            try:
                found = _solution(problem, tried, {}, ATTEMPT)
            except TooWideError:
                return chosen, cost
            if found[1] < cost:
                chosen, cost = found
    return chosen, cost


def _beside(
    problem: AssignmentProblem, remaining: Mapping[str, npt.NDArray[np.int64]], chosen: Mapping[str, int]
) -> dict[str, Costs]:
    """Return the cost of each remaining option beside the chosen options of the other choices."""
    costs = {name: own.copy() for name, own in problem.own.items()}
    for (first, second), pair in problem.pairs.items():
        costs[first] += pair[:, chosen[second]]
        costs[second] += pair[chosen[first]]
    return {name: costs[name][options] for name, options in remaining.items()}


def _solution(
    problem: AssignmentProblem,
    remaining: Mapping[str, npt.NDArray[np.int64]],
    places: Mapping[str, npt.NDArray[np.int64]],
    most_sums: int | None = None,
) -> tuple[dict[str, int], float]:
    options = {name: of_name[places[name]] if places else of_name for name, of_name in remaining.items()}
    part = restricted(problem, options)
    found = solve(part) if most_sums is None else solve(part, most_sums=most_sums)
    chosen = {name: int(options[name][place]) for name, place in found.items()}
    return chosen, problem.cost(chosen)


class _Messages:
    """The messages between choices, along the order of the problem and back."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self._names = list(problem.sizes)
        place = {name: index for index, name in enumerate(self._names)}
        self._own = [problem.own[name] for name in self._names]
        self._pairs: dict[tuple[int, int], Costs] = {}
        for (first, second), costs in problem.pairs.items():
            a, b = place[first], place[second]
            self._pairs[min(a, b), max(a, b)] = costs if a < b else costs.T
        self._before: list[list[int]] = [[] for _ in self._names]
        self._after: list[list[int]] = [[] for _ in self._names]
        for a, b in self._pairs:
            self._after[a].append(b)
            self._before[b].append(a)
        sizes = [len(own) for own in self._own]
        self._sent = {(a, b): np.zeros(sizes[b]) for a, b in self._pairs}
        self._sent |= {(b, a): np.zeros(sizes[a]) for a, b in self._pairs}
        self._excess = [own - own.min() for own in self._own]

    @property
    def size(self) -> int:
        """The costs that a round reads."""
        return sum(costs.size for costs in self._pairs.values())

    def forward(self) -> None:
        """Send along the order; note each option's excess over the best of its choice."""
        for place in range(len(self._names)):
            held = self._held(place)
            self._excess[place] = held - held.min()
            share = held * self._share(place)
            for later in self._after[place]:
                self._send(place, later, share, self._pairs[place, later])

    def backward(self) -> float:
        """Send against the order; return the lower bound of all solutions.

        The costs are the bound and terms of 0 or more: each choice's share that it did not send, and each pair with
        what it got less what it gave.
        """
        bound = 0.0
        for place in reversed(range(len(self._names))):
            held = self._held(place)
            least = float(held.min())
            bound += least
            share = (held - least) * self._share(place)
            for earlier in self._before[place]:
                bound += self._send(place, earlier, share, self._pairs[earlier, place].T)
        return bound

    def excess(self) -> dict[str, Costs]:
        """Return, by choice, how much the bound grows with each option, from the last forward pass."""
        return dict(zip(self._names, self._excess, strict=True))

    def restrict(self, keep: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Drop all options but those at these places."""
        kept = [keep[name] for name in self._names]
        self._own = [own[places] for own, places in zip(self._own, kept, strict=True)]
        self._pairs = {(a, b): np.ascontiguousarray(c[np.ix_(kept[a], kept[b])]) for (a, b), c in self._pairs.items()}
        self._sent = {(a, b): message[kept[b]] for (a, b), message in self._sent.items()}
        self._excess = [excess[places] for excess, places in zip(self._excess, kept, strict=True)]

    def _held(self, place: int) -> Costs:
        total: Costs = self._own[place].copy()
        for other in (*self._before[place], *self._after[place]):
            total += self._sent[other, place]
        return total

    def _share(self, place: int) -> float:
        return 1.0 / max(len(self._before[place]), len(self._after[place]), 1)

    def _send(self, source: int, target: int, share: Costs, costs: Costs) -> float:
        """Send the least over the source's options, less its own least; return that."""
        message = (costs + (share - self._sent[target, source])[:, None]).min(axis=0)
        least = float(message.min())
        self._sent[source, target] = message - least
        return least
