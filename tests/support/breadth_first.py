"""Propagation as MindSpore has it, for comparison: outward from what is configured, least cost on each single edge."""

from collections import deque


def breadth_first(problem, start):
    """Decide choice after choice, each by its own cost and the edge over which it was reached."""
    near = {name: [] for name in problem.sizes}
    for (first, second), costs in problem.pairs.items():
        near[first].append((second, costs))
        near[second].append((first, costs.T))
    chosen = {}
    queue = deque()

    def decide(name, costs):
        if name not in chosen:
            chosen[name] = int(costs.argmin())
            queue.append(name)

    for name in start:
        decide(name, problem.own[name])
    for name in problem.sizes:  # what nothing configured reaches begins by itself
        decide_all(queue, near, chosen, problem, decide)
        decide(name, problem.own[name])
    decide_all(queue, near, chosen, problem, decide)
    return chosen


def decide_all(queue, near, chosen, problem, decide):
    """Spread from the queue."""
    while queue:
        name = queue.popleft()
        for other, costs in near[name]:
            decide(other, problem.own[other] + costs[chosen[name]])
