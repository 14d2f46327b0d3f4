"""COC_PARALLEL_NUM=auto: into how many chunks a step is cut, from dummy steps that are timed before the first request.

A dummy step is one of vLLM's own: the model on tokens that nobody asked for, without attention. Two numbers of tokens
are tried, the largest and a quarter of it, each in every count in turn; the ranks of a group compare their times and
take the same counts. Nothing is measured in a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.process_groups.consistency import exchange

# Chunks of a step; one chunk: vLLM's own code runs.
COUNTS = (1, 2, 4, 8)
TURNS = 3
# Share of a step's time: chunks must gain more than this.
LEAST_GAIN = 0.02

Seconds = Mapping[int, Sequence[float]]
"""By count of chunks, the seconds of a step in each turn."""


@dataclass(frozen=True)
class TimedSteps:
    """The seconds of dummy steps with so many tokens, of the slowest rank, and the count of chunks that is kept."""

    tokens: int
    seconds: Mapping[int, float]
    count: int

    def __str__(self) -> str:
        """Return the choice with its figures, in words."""
        whole, chosen = self.seconds[1], self.seconds[self.count]
        if self.count == 1:
            best = min(COUNTS[1:], key=lambda count: self.seconds[count])
            return f"{self.tokens} tokens whole ({1e3 * whole:.0f} ms; in {best} chunks {1e3 * self.seconds[best]:.0f})"
        return f"{self.tokens} tokens in {self.count} chunks ({1e3 * chosen:.0f} ms; whole {1e3 * whole:.0f})"


@dataclass(frozen=True)
class MeasuredCounts:
    """The count of chunks for any number of tokens, from steps with some."""

    steps: tuple[TimedSteps, ...]
    took: float

    def count(self, tokens: int) -> int:
        """Return the count of the nearest number of tokens that was tried, by ratio."""
        return min(self.steps, key=lambda step: max(step.tokens / tokens, tokens / step.tokens)).count

    def __str__(self) -> str:
        """Return all choices in words."""
        return f"auto, timed in {self.took:.1f} s: {', '.join(map(str, self.steps))}"


def measure(
    step: Callable[[int, int], None], most_tokens: int, least_tokens: int, group: dist.ProcessGroup
) -> MeasuredCounts:
    """Return the counts that ``step(tokens, count)``, a dummy step, is fastest with; every rank of `group` calls this.

    least_tokens: the number below which no step is cut. Raises `CollectiveError` with the ranks that do not come.
    """
    begin = time.perf_counter()
    sizes = [tokens for tokens in (most_tokens, most_tokens // 4) if tokens >= least_tokens]
    own = {str(tokens): timed(step, tokens) for tokens in sizes}
    by_rank = exchange(group, "the choice of COC_PARALLEL_NUM=auto", own, CollectiveError)
    steps = tuple(chosen(tokens, [found[str(tokens)] for found in by_rank.values()]) for tokens in sizes)
    return MeasuredCounts(steps, time.perf_counter() - begin)


def timed(step: Callable[[int, int], None], tokens: int) -> list[list[float]]:
    """Return this rank's seconds of a step in each turn, by the place of its count in `COUNTS`, after a warm-up."""
    seconds: list[list[float]] = [[] for _ in COUNTS]
    for _ in range(1 + TURNS):
        for count, turns in zip(COUNTS, seconds, strict=True):
            begin = time.perf_counter()
            step(tokens, count)
            turns.append(time.perf_counter() - begin)
    return [turns[1:] for turns in seconds]


def chosen(tokens: int, by_rank: Sequence[Sequence[Sequence[float]]]) -> TimedSteps:
    """Return the count to keep: the fastest by the median of the slowest rank's turns, one chunk unless others gain."""
    slowest = [[max(turn) for turn in zip(*turns, strict=True)] for turns in zip(*by_rank, strict=True)]
    seconds = {count: median(turns) for count, turns in zip(COUNTS, slowest, strict=True)}
    best = min(COUNTS, key=lambda count: seconds[count])
    return TimedSteps(tokens, seconds, best if seconds[best] < (1 - LEAST_GAIN) * seconds[1] else 1)
