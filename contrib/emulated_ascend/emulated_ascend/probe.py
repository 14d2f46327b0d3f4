"""How fast this machine's processor runs Python, held against a reference, for the factor on the host's time."""

import time

from .wheel import Unusable

# Processor seconds of `seconds()` on the reference: a core of an AMD EPYC of 2026, CPython 3.11, otherwise idle.
REFERENCE, REFERENCE_SECONDS = "AMD EPYC, CPython 3.11", 0.0150


class _Node:
    def __init__(self, value: int) -> None:
        self.value, self.names = value, {"value": value}

    def called(self, other: int, *more: int, **named: int) -> int:
        return self.value + other + len(more) + named.get("step", 0) + self.names["value"]


def seconds(times: int = 5) -> float:
    """Return the least processor time of a fixed piece of Python: calls, dictionaries, small objects."""
    least = float("inf")
    for _ in range(times):
        began, total = time.thread_time(), 0
        for i in range(40_000):
            total += _Node(i).called(i, 1, 2, step=3)
        least = min(least, time.thread_time() - began)
    return least


def host_factor(asked: str) -> float:
    """Return the factor: a number, or by "probe" the one that makes this machine's time the reference's."""
    if asked == "probe":
        return REFERENCE_SECONDS / seconds()
    try:
        factor = float(asked)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1000:
        raise Unusable(f"--host is {asked}; allowed are a number above 0, and probe")
    return factor
