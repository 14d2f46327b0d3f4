"""Buckets of gradients that one backward fills: the order in which they start, and the all-reduces of their terms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.runtime.gradient_plan import Bucket

Start = Callable[[torch.Tensor, int, Value], dist.Work]
"""Starts the all-reduce of a tensor over a mesh dimension; the value is the first parameter in the tensor."""


class BucketOrder:
    """The order in which a backward starts its buckets, the same on all ranks whatever the order of gradients.

    A bucket starts when all its gradients have come and all buckets before it have started. The end of backward starts
    the remaining buckets; backward may have reached only some of their gradients. A gradient that comes after its
    bucket has started begins the bucket anew, behind the last bucket.

    started
        How many buckets have started.
    """

    def __init__(self, buckets: Sequence[Collection[Hashable]]) -> None:
        """Take the keys of the gradients that each bucket waits for."""
        self._waits_for = [frozenset(keys) for keys in buckets]
        self._come: list[set[Hashable]] = [set() for _ in buckets]
        self.started = 0

    def add(self, bucket: int, key: Hashable) -> list[int]:
        """Note that a gradient of a bucket has come; return the buckets to start now, in order."""
        self._come[bucket].add(key)
        ready: list[int] = []
        while len(ready) < len(self._waits_for) and self._waits_for[self._next] <= self._come[self._next]:
            ready.append(self._start())
        return ready

    def end(self) -> list[int]:
        """Return the buckets to start at the end of backward, in order."""
        rest: list[int] = []
        while self._next or any(self._come):
            rest.append(self._start())
        return rest

    @property
    def _next(self) -> int:
        return self.started % len(self._waits_for)

    def _start(self) -> int:
        bucket = self._next
        self._come[bucket].clear()
        self.started += 1
        return bucket


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
        totals = _unflatten_dense_tensors(self._flat, self._leaves)  # type: ignore[no-untyped-call]
        for leaf, total in zip(self._leaves, totals, strict=True):
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


class BackwardBuckets:
    """The buckets of one backward, and their running sums.

    A second term of the same parameter, as from two forwards, is added to the first if the bucket has not started.
    """

    def __init__(self, buckets: Sequence[Bucket], waits_for: Sequence[Collection[Value]], start: Start) -> None:
        """Take the buckets in the order in which backward fills them, and the parameters that each waits for."""
        self._buckets, self._start = buckets, start
        self._order = BucketOrder(waits_for)
        self._terms: list[dict[Value, Term]] = [{} for _ in buckets]
        self._sums: list[BucketSum] = []

    def add(self, index: int, term: Term) -> None:
        """Add a term to a bucket; start the buckets that are complete."""
        terms = self._terms[index]
        if term.value in terms:
            term = Term(term.value, term.leaf, terms[term.value].tensor + term.tensor)
        terms[term.value] = term
        self._launch(self._order.add(index, term.value))

    def end(self) -> None:
        """Start the remaining buckets, wait for all, and add the sums to the leaves' gradients."""
        self._launch(self._order.end())
        finish_all(self._sums)

    def _launch(self, indices: Sequence[int]) -> None:
        """Start these buckets, unless they are empty."""
        for index in indices:
            terms, self._terms[index] = self._terms[index], {}
            if terms:
                for bucket_sum in self._sums:
                    bucket_sum.start_next_dim()
                bucket = self._buckets[index]
                present = [terms[member.value] for member in bucket.members if member.value in terms]
                self._sums.append(BucketSum(present, bucket.dims, self._start))
