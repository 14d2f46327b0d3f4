"""Gradients summed into the boxes of those who need them, bucket by bucket, while backward runs (ZeRO level 2).

Each bucket leaves as soon as its gradients and the buckets before it are there, and they are freed: so the order is
the same on all ranks, whatever arrives when. When backward ends the rest follows, zeros for what was not reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from ascend_parallel.training.optimizer.buckets import Scatter, in_buckets
from ascend_parallel.training.optimizer.shares import Share, by_group, told

# Buckets on their way at the same time: more would hold more memory.
IN_FLIGHT = 2


class GradientScatter:
    """Takes the gradients of shared targets after each backward, all ranks of their groups alike."""

    def __init__(self, shares: Sequence[Share], bucket_bytes: int) -> None:
        """Hang a hook on each parameter; the last targets, whose gradients are there first, go first."""
        self._shares = [one for one in reversed(shares) if one[0].group is not None]
        self._buckets: list[list[int]] = []
        for _, chosen in by_group([target for target, _, _ in self._shares]):
            parameters = [self._shares[index][0].parameter for index in chosen]
            self._buckets += [[chosen[index] for index in one] for one in in_buckets(parameters, bucket_bytes)]
        self._buckets.sort(key=lambda one: one[0])
        self._reached: set[int] = set()
        self._paused = False
        self._flying: deque[tuple[list[int], Scatter]] = deque()
        self._restart()
        for index, (target, _, _) in enumerate(self._shares):
            hook = partial(self._arrived, index)
            hook.takes_terms = True  # type: ignore[attr-defined]  # knows that gradients are not summed yet
            target.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients where they are, in backwards inside the context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish(self) -> None:
        """Take what is left in parameters, if any rank has something left, and drop what no rank has reached."""
        reached, left = set(self._reached), set()
        for group, indices in by_group([target for target, _, _ in self._shares]):
            assert group is not None
            targets = [self._shares[index][0] for index in indices]
            here = [target.parameter.grad is not None for target in targets]
            flags = [[index in self._reached for index in indices], here]
            anywhere, lying = told(flags, targets[0].parameter, group)
            reached |= {index for index, one, two in zip(indices, anywhere, lying, strict=True) if one or two}
            left |= {index for index, yes in zip(indices, lying, strict=True) if yes}
        for bucket in self._buckets:
            if not left.isdisjoint(bucket):
                self._launch(bucket)
        self._land(0)
        for index, (_, _, owned) in enumerate(self._shares):
            if owned is not None and index not in reached:
                owned.drop()
            elif owned is not None:
                owned.settle()
        self._reached.clear()

    def drop(self) -> None:
        """Forget all gradients, also after a backward that failed."""
        self._land(0)
        self._restart()
        self._reached.clear()

    def _restart(self) -> None:
        self._ready: set[int] = set()
        self._next, self._waits = 0, False

    @torch.no_grad()
    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if self._paused:
            return
        if not self._waits:
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._backward_ended)
            self._waits = True
        self._ready.add(index)
        while self._next < len(self._buckets) and self._ready.issuperset(self._buckets[self._next]):
            self._launch(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _backward_ended(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._land(0)
        self._restart()

    def _launch(self, bucket: list[int]) -> None:
        parameters = [self._shares[index][0].parameter for index in bucket]
        group = self._shares[bucket[0]][0].group
        assert group is not None
        gradients = [one.grad for one in parameters]
        self._reached |= {index for index, one in zip(bucket, gradients, strict=True) if one is not None}
        divisions = [self._shares[index][1] for index in bucket]
        self._flying.append((bucket, Scatter(gradients, parameters, divisions, group)))
        for one in parameters:
            one.grad = None
        self._land(IN_FLIGHT)

    def _land(self, left: int) -> None:
        """Wait until at most `left` buckets are on their way."""
        while len(self._flying) > left:
            bucket, scatter = self._flying.popleft()
            for index, summed in zip(bucket, scatter.take(), strict=True):
                owned = self._shares[index][2]
                if owned is not None and summed is not None:
                    owned.accumulate(summed)
