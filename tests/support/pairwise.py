"""Short tables in place of products of lists."""

import pytest


def pairwise(first, second, third):
    """Return triples in which each value of a list occurs with each value of every other list, once for the first two.

    The third list may be no longer than the others.
    """
    first, second, third = list(first), list(second), list(third)
    if len(third) > min(len(first), len(second)):
        raise ValueError(f"the third list has {len(third)} values: give the shortest list last")
    return [(one, two, third[(i + j) % len(third)]) for i, one in enumerate(first) for j, two in enumerate(second)]


def base_choice(first, second, base):
    """Return all pairs of two lists for `parametrize`; those that differ from the pair `base` in both are stress tests.

    Each value then runs beside the base of the other list, as far as neither list depends on the other.
    """
    return [
        pytest.param(one, two, marks=[] if one == base[0] or two == base[1] else pytest.mark.stress)
        for one in first
        for two in second
    ]
