"""The smallest set of choices that reaches a goal, where each attempt is costly: implicit hitting sets.

An attempt with some choices either reaches the goal, or tells which other choices came out right anyway. All choices
that came out right together still miss the goal, so every set that reaches the goal has one of the others. The next
attempt is the lightest set that has one choice of each of these "others". If it reaches the goal, no lighter set does
(Reiter 1987, doi:10.1016/0004-3702(87)90062-2). This needs that more choices never lose the goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

Attempt = Callable[[frozenset[int]], "frozenset[int] | None"]
"""Takes choices; None: the goal is reached; else the choices that came out right, which include those taken."""


class _Counted:
    """An attempt that may be made a number of times, and that remembers the smallest set that reached the goal."""

    def __init__(self, attempt: Attempt, most: int, best: frozenset[int]) -> None:
        self.attempt, self.left, self.best = attempt, most, best

    def __call__(self, chosen: frozenset[int]) -> frozenset[int] | None:
        self.left -= 1
        right = self.attempt(chosen)
        if right is None and len(chosen) < len(self.best):
            self.best = chosen
        return right


def smallest_set(weights: Sequence[float], attempt: Attempt, most: int) -> tuple[frozenset[int], bool]:
    """Return the lightest set of choices that reaches the goal, and whether it is proven to be.

    weights
        The weight of each choice, above 0. All choices together have to reach the goal.
    most
        The attempts to make. Afterwards the smallest set found is returned, from which each choice has been tried to
        be left out.
    """
    everything = frozenset(range(len(weights)))
    counted = _Counted(attempt, most, everything)
    others: list[frozenset[int]] = []
    while counted.left > 0:
        chosen = _hitting(others, weights)
        right = counted(chosen)
        if right is None:
            return chosen, True
        others.append(everything - _grown(right, everything, weights, counted))
    return _shrunk(counted.best, weights, attempt), False


def _grown(
    right: frozenset[int], everything: frozenset[int], weights: Sequence[float], counted: _Counted
) -> frozenset[int]:
    """Return a set that misses the goal, and reaches it with any other choice; less if no attempts are left."""
    for choice in sorted(everything - right, key=lambda each: (-weights[each], each)):
        if choice not in right and counted.left > 0:
            more = counted(right | {choice})
            right = right if more is None else more
    return right


def _shrunk(chosen: frozenset[int], weights: Sequence[float], attempt: Attempt) -> frozenset[int]:
    """Return the set without the choices that are not needed, the heaviest first."""
    for choice in sorted(chosen, key=lambda each: (-weights[each], each)):
        if attempt(chosen - {choice}) is None:
            chosen -= {choice}
    return chosen


def _hitting(others: Sequence[frozenset[int]], weights: Sequence[float]) -> frozenset[int]:
    """Return the lightest set that has a choice of each of the sets."""
    if not others:
        return frozenset()
    rows = np.array([[choice in each for choice in range(len(weights))] for each in others], dtype=float)
    found = milp(
        np.array(weights),
        constraints=LinearConstraint(rows, lb=1.0),
        bounds=Bounds(0, 1),
        integrality=np.ones(len(weights)),
        options={"mip_rel_gap": 0.0},
    )
    return frozenset(int(choice) for choice in np.flatnonzero(found.x > 0.5))
