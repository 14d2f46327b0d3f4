"""Buckets of gradient terms that one backward fills, each all-reduced as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.sharding.graph import Value

Start = Callable[[torch.Tensor, int, Value], dist.Work]
"""Starts the all-reduce of a tensor over a mesh dimension; the value is the first parameter in the tensor."""


@dataclass(frozen=True)
class Term:
    """A rank's term of a parameter's gradient."""

    value: Value
    leaf: torch.Tensor
    tensor: torch.Tensor


class BucketSum:
    """The all-reduces of one tensor of terms, over one mesh dimension after another."""

    def __init__(self, terms: Sequence[Term], dims: Sequence[int], start: Start) -> None:
        """Copy the terms into one tensor and start the all-reduce over the first mesh dimension."""
        self._leaves = [term.leaf for term in terms]
        self._value, self._dims, self._start = terms[0].value, list(dims), start
        self._flat = torch.cat([term.tensor.reshape(-1) for term in terms])
        self._work: dist.Work | None = None
        self.start_next_dim()

    def start_next_dim(self) -> bool:
        """Start the all-reduce over the next mesh dimension; return False if none is left."""
        if not self._dims:
            return False
        if self._work is not None:
            self._work.wait()
        self._work = self._start(self._flat, self._dims.pop(0), self._value)
        return True

    @torch.no_grad()
    def accumulate(self) -> None:
        """Wait and add the sums to the leaves' gradients. A missing gradient becomes a view of the bucket."""
        assert self._work is not None
        self._work.wait()
        parts = torch.split(self._flat, [leaf.numel() for leaf in self._leaves])
        for leaf, part in zip(self._leaves, parts, strict=True):
            total = part.view(leaf.shape)
            if leaf.grad is None:
                leaf.grad = total
            else:
                leaf.grad.add_(total)


def finish_all(sums: Sequence[BucketSum]) -> None:
    """Wait for all sums and add them to the leaves' gradients."""
    left = list(sums)
    while left:
        left = [bucket_sum for bucket_sum in left if bucket_sum.start_next_dim()]
    for bucket_sum in sums:
        bucket_sum.accumulate()


@dataclass(frozen=True)
class Slot:
    """A bucket to fill: the parameters that it waits for, and the mesh dimensions of its sum."""

    waits_for: tuple[Value, ...]
    dims: tuple[int, ...]


class BackwardBuckets:
    """The buckets of one backward, and their running sums.

    A bucket starts when its terms are complete and all buckets before it have started. The end of backward starts the
    remaining buckets; backward may have reached only some of their parameters. A second term of the same parameter, as
    from two forwards, is added to the first, or begins the bucket anew if the bucket has started.
    """

    def __init__(self, slots: Sequence[Slot], start: Start) -> None:
        """Take the buckets in the order in which backward fills them."""
        self._slots, self._start = slots, start
        self._terms: list[dict[Value, Term]] = [{} for _ in slots]
        self._sums: list[BucketSum] = []
        self._next = 0

    def add(self, index: int, term: Term) -> None:
        """Add a term to a bucket; start the buckets that are complete."""
        terms = self._terms[index]
        if term.value in terms:
            term = Term(term.value, term.leaf, terms[term.value].tensor + term.tensor)
        terms[term.value] = term
        for _ in self._slots:
            if not set(self._slots[self._next].waits_for) <= self._terms[self._next].keys():
                break
            self._launch()

    def end(self) -> None:
        """Start the remaining buckets, wait for all, and add the sums to the leaves' gradients."""
        for _ in self._slots:
            self._launch()
        finish_all(self._sums)

    def _launch(self) -> None:
        """Start the next bucket, unless the bucket is empty."""
        index = self._next
        terms, self._terms[index] = self._terms[index], {}
        self._next = (index + 1) % len(self._slots)
        if terms:
            for bucket_sum in self._sums:
                bucket_sum.start_next_dim()
            slot = self._slots[index]
            present = [terms[value] for value in slot.waits_for if value in terms]
            self._sums.append(BucketSum(present, slot.dims, self._start))
