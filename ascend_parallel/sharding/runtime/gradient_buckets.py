"""Tensors summed over ranks as one: buckets that one backward fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.sharding.graph import Value

Start = Callable[[torch.Tensor, int, Value], dist.Work]
"""Starts the sum of a tensor over a mesh dimension; the value is the first in it."""


@dataclass(frozen=True)
class Term:
    """A rank's term of a parameter's gradient."""

    value: Value
    leaf: torch.Tensor
    tensor: torch.Tensor


class Sum:
    """Terms that are summed as one tensor, over one mesh dimension after the other."""

    def __init__(self, terms: Sequence[Term], dims: Sequence[int], start: Start) -> None:
        """Start the sum over the first mesh dimension. The terms are not changed, and not kept."""
        self._leaves = [term.leaf for term in terms]
        self._value, self._dims, self._start = terms[0].value, list(dims), start
        self._flat = torch.cat([term.tensor.reshape(-1) for term in terms])
        self._work: dist.Work | None = None
        self.go_on()

    def go_on(self) -> bool:
        """Start the sum over the next mesh dimension; False if it runs over the last."""
        if not self._dims:
            return False
        if self._work is not None:
            self._work.wait()
        self._work = self._start(self._flat, self._dims.pop(0), self._value)
        return True

    @torch.no_grad()
    def give(self) -> None:
        """Wait, and add the sums to the leaves' gradients, which are parts of one tensor where they were none."""
        assert self._work is not None
        self._work.wait()
        parts = torch.split(self._flat, [leaf.numel() for leaf in self._leaves])
        for leaf, part in zip(self._leaves, parts, strict=True):
            total = part.view(leaf.shape)
            if leaf.grad is None:
                leaf.grad = total
            else:
                leaf.grad.add_(total)


def give_all(sums: Sequence[Sum]) -> None:
    """Wait for all, and add them to the leaves' gradients."""
    left = list(sums)
    while left:
        left = [one for one in left if one.go_on()]
    for one in sums:
        one.give()


@dataclass(frozen=True)
class Slot:
    """A bucket to be filled: the tensors that it waits for, and the mesh dimensions over which it is summed."""

    waits_for: tuple[Value, ...]
    dims: tuple[int, ...]


class Backward:
    """What one backward brings: terms in buckets, and the sums that run.

    A bucket is started when it has all that it waits for and those before it were started; the end starts what is
    left, of which some was not reached. A term that comes twice, as from two forwards, is added, or begins the bucket
    anew.
    """

    def __init__(self, slots: Sequence[Slot], start: Start) -> None:
        """Take the buckets in the order in which they are filled."""
        self._slots, self._start = slots, start
        self._terms: list[dict[Value, Term]] = [{} for _ in slots]
        self._sums: list[Sum] = []
        self._next = 0

    def add(self, index: int, term: Term) -> None:
        """Take a term for a bucket."""
        terms = self._terms[index]
        if term.value in terms:
            term = Term(term.value, term.leaf, terms[term.value].tensor + term.tensor)
        terms[term.value] = term
        for _ in self._slots:
            if not set(self._slots[self._next].waits_for) <= self._terms[self._next].keys():
                break
            self._launch()

    def end(self) -> None:
        """Start what is left, wait for all, and give it to the leaves."""
        for _ in self._slots:
            self._launch()
        give_all(self._sums)

    def _launch(self) -> None:
        """Start the next bucket, if anything is in it."""
        index = self._next
        terms, self._terms[index] = self._terms[index], {}
        self._next = (index + 1) % len(self._slots)
        if terms:
            for one in self._sums:
                one.go_on()
            slot = self._slots[index]
            self._sums.append(Sum([terms[value] for value in slot.waits_for if value in terms], slot.dims, self._start))
