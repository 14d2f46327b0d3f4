"""Reduce-scatter gradients to their owners, bucket by bucket, while backward runs (ZeRO stage 2).

A bucket is sent, and its gradients freed, in the order of `BucketOrder`. At the end of backward the remaining buckets
follow, with zeros for gradients that were not reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from ascend_parallel.sharding.runtime.gradient_buckets import BucketOrder
from ascend_parallel.training.optimizer.buckets import BucketReduceScatter, bucket_indices
from ascend_parallel.training.optimizer.shares import PartitionedParameter, any_rank_set, by_group

# Buckets in flight at the same time: more would hold more memory.
IN_FLIGHT = 2


class GradientReduceScatter:
    """Takes the gradients of replicated targets after each backward; all ranks of a group call it alike."""

    def __init__(self, shares: Sequence[PartitionedParameter], bucket_bytes: int) -> None:
        """Register a hook on each parameter; the last targets, whose gradients are ready first, go first."""
        self._shares = [share for share in reversed(shares) if share.target.group is not None]
        self._buckets: list[list[int]] = []
        for _, chosen in by_group([share.target for share in self._shares]):
            parameters = [self._shares[index].target.parameter for index in chosen]
            self._buckets += [[chosen[index] for index in part] for part in bucket_indices(parameters, bucket_bytes)]
        self._buckets.sort(key=lambda bucket: bucket[0])
        self._order: BucketOrder | None = None  # of the running backward
        self._reached: set[int] = set()
        self._paused = False
        self._in_flight: deque[tuple[list[int], BucketReduceScatter]] = deque()
        for index, share in enumerate(self._shares):
            hook = partial(self._gradient_ready, index)
            hook.takes_terms = True  # type: ignore[attr-defined]  # the hook expects gradients that are not summed yet
            share.target.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients in the parameters during backwards inside the context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish(self) -> None:
        """Reduce gradients still in parameters, if any rank has any; drop gradients that no rank has reached."""
        reached, left = set(self._reached), set()
        for group, indices in by_group([share.target for share in self._shares]):
            assert group is not None
            targets = [self._shares[index].target for index in indices]
            has_grad = [target.parameter.grad is not None for target in targets]
            flags = [[index in self._reached for index in indices], has_grad]
            any_reached, any_left = any_rank_set(flags, targets[0].parameter, group)
            left |= {index for index, is_left in zip(indices, any_left, strict=True) if is_left}
            reached |= left | {index for index, is_reached in zip(indices, any_reached, strict=True) if is_reached}
        self._launch([number for number, bucket in enumerate(self._buckets) if not left.isdisjoint(bucket)])
        self._wait_until(0)
        for index, share in enumerate(self._shares):
            if share.owned is not None and index not in reached:
                share.owned.drop()
            elif share.owned is not None:
                share.owned.settle()
        self._reached.clear()

    def drop(self) -> None:
        """Drop all gradients, also after a backward that failed."""
        self._wait_until(0)
        self._order = None
        self._reached.clear()

    @torch.no_grad()
    def _gradient_ready(self, index: int, parameter: torch.Tensor) -> None:
        if self._paused:
            return
        if self._order is None:
            self._order = BucketOrder(self._buckets)
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._backward_ended)
        if not self._order.has_started(index):  # else the gradient stays in the parameter, for `finish`
            self._launch(self._order.add(index))

    @torch.no_grad()
    def _backward_ended(self) -> None:
        order, self._order = self._order, None
        if order is not None:  # else drop() was called inside backward
            self._launch(order.end())
            self._wait_until(0)

    def _launch(self, numbers: Sequence[int]) -> None:
        for bucket in (self._buckets[number] for number in numbers):
            parameters = [self._shares[index].target.parameter for index in bucket]
            group = self._shares[bucket[0]].target.group
            assert group is not None
            gradients = [param.grad for param in parameters]
            self._reached |= {index for index, gradient in zip(bucket, gradients, strict=True) if gradient is not None}
            partitions = [self._shares[index].partition for index in bucket]
            self._in_flight.append((bucket, BucketReduceScatter(gradients, parameters, partitions, group)))
            for param in parameters:
                param.grad = None
            self._wait_until(IN_FLIGHT)

    def _wait_until(self, left: int) -> None:
        """Wait for the oldest buckets until `left` are in flight; accumulate their sums in this rank's shards."""
        while len(self._in_flight) > left:
            bucket, reduce_scatter = self._in_flight.popleft()
            for index, summed in zip(bucket, reduce_scatter.wait(), strict=True):
                owned = self._shares[index].owned
                if owned is not None and summed is not None:
                    owned.accumulate(summed)
