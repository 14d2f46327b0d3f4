"""A short table in place of the product of three lists."""


def pairwise(first, second, third):
    """Return triples in which each value of a list occurs with each value of every other list, once for the first two.

    The third list may be no longer than the others.
    """
    first, second, third = list(first), list(second), list(third)
    if len(third) > min(len(first), len(second)):
        raise ValueError(f"the third list has {len(third)} values: give the shortest list last")
    return [(one, two, third[(i + j) % len(third)]) for i, one in enumerate(first) for j, two in enumerate(second)]
