"""Operations on sets of time, as sorted lists of intervals that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

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
    common = []
    for begin, end in intervals:
        common += [(max(begin, b), min(end, e)) for b, e in others if b < end and e > begin]
    return common


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the first set minus the second."""
    left = []
    for begin, end in intervals:
        for b, e in others:
            if b < end and e > begin:
                left.append((begin, max(begin, b)))
                begin = min(end, e)
        left.append((begin, end))
    return union(left)
