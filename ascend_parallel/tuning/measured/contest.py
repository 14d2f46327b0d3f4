"""One rule of what wins: chunks of a pass, groups of parts, regions and the steps of a server are timed the same way.

What runs already stays unless a challenger beats it by more than noise, round by round, on the slowest rank of each
round. Every rank has the same seconds, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import comb
from statistics import median
from typing import NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)
Seconds = Sequence[float]

LEAST_GAIN = 0.02  # share of the standing way's time: a challenger must gain more than this in the median of the rounds
LUCK = 1 / 16  # the chance that a challenger which gains nothing may have of winning


@lru_cache(maxsize=64)
def may_lose(rounds: int) -> int:
    """Return how many rounds a winning challenger may lose: 1 of 7, 3 of 14, 6 of 21; of few rounds 1."""
    chances = accumulate(comb(rounds, lost) * 0.5**rounds for lost in range(rounds + 1))
    return max(1, len([chance for chance in chances if chance <= LUCK]) - 1)


class Contest(NamedTuple):
    """The seconds of what runs unless it is beaten, and of its challenger, in the same rounds."""

    standing: Seconds
    challenger: Seconds

    @property
    def gains(self) -> list[float]:
        """The share of the standing way's time that the challenger gains, by round."""
        return [1 - ours / theirs for ours, theirs in zip(self.challenger, self.standing, strict=True)]

    @property
    def gain(self) -> float:
        """The median of the gains."""
        return median(self.gains)

    @property
    def lost(self) -> int:
        """The number of rounds in which the challenger gains nothing."""
        return sum(gain <= 0 for gain in self.gains)

    @property
    def won(self) -> bool:
        """Whether the challenger wins."""
        return self.gain > LEAST_GAIN and self.lost <= may_lose(len(self.gains))

    @property
    def is_clear(self) -> bool:
        """Whether every round says the same: that the challenger gains twice the least gain, or that it loses."""
        return min(self.gains) > 2 * LEAST_GAIN or max(self.gains) <= 0


def fastest(times: Mapping[Name, Seconds], names: Iterable[Name]) -> Name:
    """Return the name of least median seconds; of equal ones the first."""
    return min(names, key=lambda name: median(times[name]))


def slowest(by_rank: Sequence[Seconds]) -> list[float]:
    """Return the seconds of the slowest rank in each round, from those of every rank."""
    return [max(map(float, spent)) for spent in zip(*by_rank, strict=True)]
