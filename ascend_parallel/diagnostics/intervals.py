"""Sets of time: unions, intersections and differences of intervals, each in time linear in their number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

# A set of time: a sorted list of intervals that do not touch.
Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of intervals, which may overlap and have any order."""
    joined: Intervals = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Intervals) -> int:
    """Return the total length of the intervals."""
    return sum(end - begin for begin, end in intervals)


def within(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the intersection of both sets."""
    common, index = [], _first(intervals, others)
    for begin, end in intervals:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            common.append((max(begin, others[at][0]), min(end, others[at][1])))
            at += 1
    return common


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the first set minus the second."""
    left, index = [], _first(intervals, others)
    for begin, end in intervals:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def _first(intervals: Intervals, others: Intervals) -> int:
    """Return the index of the first of the others that ends behind the begin of the intervals."""
    return bisect_right(others, intervals[0][0], key=lambda other: other[1]) if intervals else 0
