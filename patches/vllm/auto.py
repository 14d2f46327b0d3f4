"""Into how many chunks a step is cut: by dummy steps that are timed before the first request, or by a plan.

A dummy step is one of vLLM's own: the model on tokens that nobody asked for, without attention. Two numbers of tokens
are tried, the largest and a quarter of it, each in every count in turn; the ranks of a group compare their times and
take the same counts. Nothing is measured in a request. "auto" also tries a compiled model outside its graphs, where
rows stay unfinished past a layer. COC_TUNE keeps what was found in a plan file: for each number of tokens an entry of
each row layer's matmul, whose times are those of the whole step. COC_PLAN reads such a file.

Where no device graph hides the calls of Python that an operator costs a small step, "auto" puts none into the graphs:
then a step runs in vLLM's own graphs, whole, or outside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_REDUCE, Matmul
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.layer_shape import FORWARD
from ascend_parallel.process_groups.consistency import store_all_gather
from ascend_parallel.text import dtype_name
from ascend_parallel.tuning.measured.chunk_plan import Entry, Plan
from ascend_parallel.tuning.measured.contest import Contest, fastest, slowest
from ascend_parallel.tuning.measured.decider import Decider

# Chunks of a step; one chunk: vLLM's own code runs.
COUNTS = (1, 2, 4, 8)
TURNS = 3


class StepVariant(NamedTuple):
    """How a step runs: its number of chunks, and whether a compiled model runs outside its graphs."""

    chunks: int
    eager: bool = False

    def __str__(self) -> str:
        """Return it in words."""
        text = "whole" if self.chunks == 1 else f"in {self.chunks} chunks"
        return f"{text} outside the graphs" if self.eager else text


WHOLE, *CUT = (StepVariant(count) for count in COUNTS)
EAGER = [StepVariant(count, eager=True) for count in COUNTS[1:]]


class Sum(NamedTuple):
    """What the ranks sum: [M, n] of a dtype, the product of [M, k] with a row layer's weight; k is 0 elsewhere."""

    k: int
    n: int
    dtype: torch.dtype


@dataclass(frozen=True)
class TimedSteps:
    """The seconds of dummy steps with so many tokens, of the slowest rank, and the variant that is kept."""

    tokens: int
    seconds: Mapping[StepVariant, float]
    variant: StepVariant

    def __str__(self) -> str:
        """Return the choice with its figures, in words: the fastest of each kind."""
        kinds = ([variant for variant in kind if variant in self.seconds] for kind in ([WHOLE], CUT, EAGER))
        fastest = [min(kind, key=self._milliseconds) for kind in kinds if kind and self.variant not in kind]
        others = "; ".join(f"{variant} {self._milliseconds(variant):.0f}" for variant in fastest)
        return f"{self.tokens} tokens {self.variant} ({self._milliseconds(self.variant):.0f} ms; {others})"

    def _milliseconds(self, variant: StepVariant) -> float:
        return 1e3 * self.seconds[variant]


@dataclass(frozen=True)
class MeasuredCounts:
    """The count of chunks for any number of tokens, from steps with some."""

    steps: tuple[TimedSteps, ...]
    took: float

    def count(self, tokens: int, summed: Sum) -> int:
        """Return the count of the nearest number of tokens that was tried, for every sum."""
        return self.variant(tokens).chunks

    def variant(self, tokens: int) -> StepVariant:
        """Return the variant of the nearest number of tokens that was tried."""
        return min(self.steps, key=lambda step: apart(step.tokens, tokens)).variant

    @property
    def leave_graphs(self) -> bool:
        """Whether some steps of a compiled model run outside its graphs."""
        return any(step.variant.eager for step in self.steps)

    def __str__(self) -> str:
        """Return all choices in words."""
        return f"timed in {self.took:.1f} s: {', '.join(map(str, self.steps))}"


@dataclass(frozen=True)
class PlannedCounts:
    """The count of chunks for any number of tokens, from a plan's entries of row layers."""

    plan: Plan

    def count(self, tokens: int, summed: Sum) -> int | None:
        """Return the count of the entry of the nearest number of tokens; None: the plan has none of this sum."""
        entries = self.entries_of(summed)
        if not entries:
            return None
        nearest = min(entries, key=lambda entry: apart(entry.m, tokens))
        # A rest may be a chunk more than was asked for.
        return min(len(nearest.sizes), nearest.m // nearest.sizes[0])

    def entries_of(self, summed: Sum) -> Sequence[Entry]:
        """Return the entries of a row layer; of another sum those of all row layers with as many features."""
        entries = self._by_features.get((summed.n, dtype_name(summed.dtype)), ())
        return [entry for entry in entries if summed.k in (0, entry.k)]

    @cached_property
    def _by_features(self) -> Mapping[tuple[int, str], Sequence[Entry]]:
        found: dict[tuple[int, str], list[Entry]] = {}
        for entry in self.plan.entries:
            if (entry.run, entry.operator) == (FORWARD, ALL_REDUCE):
                found.setdefault((entry.n, entry.dtype), []).append(entry)
        return found


def apart(tokens: int, others: int) -> float:
    """Return how far two numbers of tokens are apart: their ratio."""
    return max(tokens / others, others / tokens)


def tried_tokens(most_tokens: int, least_tokens: int) -> list[int]:
    """Return the numbers of tokens of the dummy steps, the largest and a quarter of it, where they are cut at all."""
    return [tokens for tokens in (most_tokens, most_tokens // 4) if tokens >= least_tokens]


def known(
    decider: Decider, sums: Sequence[Sum], tokens: Sequence[int], group: dist.ProcessGroup, device: str
) -> PlannedCounts | None:
    """Return the counts of the file of COC_TUNE, if it has all of them; every rank of `group` calls this."""
    plan = decider.plan(group, device)
    wanted = (matmul(m, summed, group, device) for m in tokens for summed in sums)
    return PlannedCounts(plan) if all(plan.entry_of(FORWARD, call) is not None for call in wanted) else None


def keep(
    decider: Decider,
    measured: MeasuredCounts,
    sums: Sequence[Sum],
    cut: Callable[[int, int], Sizes],
    group: dist.ProcessGroup,
    device: str,
) -> None:
    """Write what was measured to the file of COC_TUNE: ``cut(tokens, count)`` are a step's chunks."""
    for step in measured.steps:
        for summed in sums:
            call = matmul(step.tokens, summed, group, device)
            times = step.seconds[WHOLE], step.seconds[step.variant]
            decider.keep(Entry.of(FORWARD, call, cut(step.tokens, step.variant.chunks), *times), group, device)


def matmul(tokens: int, summed: Sum, group: dist.ProcessGroup, device: str) -> Matmul:
    """Return the matmul and all-reduce of a row layer with so many tokens."""
    return Matmul(ALL_REDUCE, tokens, summed.k, summed.n, summed.dtype, device, group.size())


def measure(
    step: Callable[[int, StepVariant], None],
    sizes: Sequence[int],
    variants: Sequence[StepVariant],
    group: dist.ProcessGroup,
) -> MeasuredCounts:
    """Return the variants in which the dummy ``step(tokens, variant)`` is fastest; every rank of `group` calls this.

    sizes: the numbers of tokens, one or more. Raises `CollectiveError` with the ranks that do not come.
    """
    begin = time.perf_counter()
    own = {str(tokens): timed(step, tokens, variants) for tokens in sizes}
    by_rank = store_all_gather(group, "the choice of chunks by timed steps", own, CollectiveError)
    steps = tuple(chosen(tokens, variants, [found[str(tokens)] for found in by_rank.values()]) for tokens in sizes)
    return MeasuredCounts(steps, time.perf_counter() - begin)


def timed(step: Callable[[int, StepVariant], None], tokens: int, variants: Sequence[StepVariant]) -> list[list[float]]:
    """Return this rank's seconds of a step in each turn, by the place of its variant in `variants`, after a warm-up."""
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(1 + TURNS):
        for variant, turns in zip(variants, seconds, strict=True):
            begin = time.perf_counter()
            step(tokens, variant)
            turns.append(time.perf_counter() - begin)
    return [turns[1:] for turns in seconds]


def chosen(tokens: int, variants: Sequence[StepVariant], by_rank: Sequence[Sequence[Sequence[float]]]) -> TimedSteps:
    """Return the fastest variant, the whole step unless others win, turn by turn on the slowest rank.

    Outside its graphs a model rounds as an eager one: leaving them must win over the fastest variant in them.
    """
    turns = {variant: slowest(of) for variant, of in zip(variants, zip(*by_rank, strict=True), strict=True)}
    kept = WHOLE
    for kind in ([variant for variant in of if variant in turns] for of in (CUT, EAGER)):
        best = fastest(turns, kind) if kind else kept
        kept = best if Contest(turns[kept], turns[best]).won else kept
    return TimedSteps(tokens, {variant: median(seconds) for variant, seconds in turns.items()}, kept)
