"""Buckets of gradients that one backward fills: the order in which they start, and the all-reduces of their terms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch._utils import _unflatten_dense_tensors

from ascend_parallel.ops.clocks import Work
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.runtime.gradient_plan import Bucket, SummedGradient, buckets

Start = Callable[[torch.Tensor, int, Value], Work]
"""Starts the all-reduce of a tensor over a mesh dimension; the value is the first parameter in the tensor."""


class BucketOrder:
    """The order in which a backward starts its buckets, the same on all ranks whatever the order of gradients.

    A bucket starts when all its gradients have come and all buckets before it have started. The end of backward starts
    the remaining buckets; backward may have reached only some of their gradients. A gradient that comes after its
    bucket has started begins the bucket anew, behind the last bucket.
    """

    def __init__(self, buckets: Iterable[Iterable[Hashable]]) -> None:
        """Take the keys of the gradients that each bucket waits for."""
        self._buckets = [frozenset(keys) for keys in buckets]
        self._come: set[Hashable] = set()
        self._started = 0

    def add(self, key: Hashable) -> list[int]:
        """Note that a gradient has come; return the buckets to start now, in order."""
        self._come.add(key)
        ready: list[int] = []
        while len(ready) < len(self._buckets) and self._buckets[self._next] <= self._come:
            ready.append(self._start())
        return ready

    def end(self) -> list[int]:
        """Return the buckets to start at the end of backward, in order."""
        if not self._buckets:
            return []
        rest = [self._start() for _ in self._buckets[self._next :]] if self._next else []
        return rest + ([self._start() for _ in self._buckets] if self._come else [])

    def has_started(self, key: Hashable) -> bool:
        """Tell whether a gradient's bucket has started."""
        return any(key in keys for keys in self._buckets[: self._started])

    @property
    def _next(self) -> int:
        return self._started % len(self._buckets)

    def _start(self) -> int:
        bucket = self._next
        self._come -= self._buckets[bucket]
        self._started += 1
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
        self._work: Work | None = None
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

    taken
        The gradients of earlier backwards that go into the sums: name, parameter, gradient, and the dimensions over
        which it is still to be summed. They are the parameters' again if this backward fails.
    """

    def __init__(
        self, buckets: Sequence[Bucket], waits_for: Iterable[Iterable[Value]], start: Start, bucket_bytes: int
    ) -> None:
        """Take the buckets in the order in which backward fills them, and the parameters that each waits for.

        bucket_bytes: the size of the buckets of what earlier backwards have left.
        """
        self._buckets, self._start, self._order = buckets, start, BucketOrder(waits_for)
        self._bucket_bytes = bucket_bytes
        self.taken: list[tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]]] = []
        self._terms: dict[Value, Term] = {}
        self._left: dict[SummedGradient, Term] = {}
        self._sums: list[BucketSum] = []

    def add(self, term: Term) -> None:
        """Add a term to its bucket; start the buckets that are complete."""
        if term.value in self._terms:
            term = replace(term, tensor=self._terms[term.value].tensor + term.tensor)
        self._terms[term.value] = term
        self._launch(self._order.add(term.value))

    def add_left(self, param: SummedGradient, term: Term) -> None:
        """Add a gradient that earlier backwards have left, to be summed over other dimensions than the new terms."""
        self._left[param] = term

    def end(self) -> None:
        """Start the remaining buckets, wait for all, and add the sums to the leaves' gradients."""
        self._launch(self._order.end())
        # In the order of names: that in which gradients come is not for certain the same on all ranks.
        for bucket in buckets(sorted(self._left, key=lambda param: param.name), self._bucket_bytes):
            self._sums.append(BucketSum([self._left[param] for param in bucket.members], bucket.dims, self._start))
        finish_all(self._sums)

    def _launch(self, indices: Sequence[int]) -> None:
        """Start these buckets, unless they are empty."""
        for bucket in (self._buckets[index] for index in indices):
            terms = [self._terms.pop(member.value) for member in bucket.members if member.value in self._terms]
            if terms:
                for bucket_sum in self._sums:
                    bucket_sum.start_next_dim()
                self._sums.append(BucketSum(terms, bucket.dims, self._start))
