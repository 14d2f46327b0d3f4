"""Redistributions that start at one node of a forward and finish at a later node; backward runs them in reverse.

Autograd sees two functions. `_Begin` takes the tensors and returns an empty token, which orders `_Begin` before `_End`.
`_End` returns a tensor. In backward each `_End` hands over its gradient, and the last `_End` starts the collectives of
the gradients. `_Begin` runs after the backward of every node between the two: it waits and returns the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.redistribute.collectives import CoalescedCollective, Request
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution
from ascend_parallel.sharding.redistribute.redistribute_local import RequestGenerator, finish_redistribute


class InFlight:
    """Running redistributions, by number. First collectives with the same coalesce key run as one."""

    def __init__(self, steps: dict[int, RequestGenerator]) -> None:
        """Start the redistributions."""
        self._steps, self._results = steps, dict[int, torch.Tensor]()
        by_key: dict[Hashable, dict[int, Request]] = {}
        for index, moving in steps.items():
            try:
                request = next(moving)
            except StopIteration as stop:
                self._results[index] = stop.value
            else:
                by_key.setdefault(request.coalesce_key, {})[index] = request
        self._coalesced: dict[int, CoalescedCollective] = {}
        for requests in by_key.values():
            self._coalesced |= dict.fromkeys(requests, CoalescedCollective(list(requests.values())))

    def end(self, index: int) -> torch.Tensor:
        """Wait for a redistribution and return its result. Call this once for each number."""
        if index in self._coalesced:
            self._coalesced.pop(index).wait()
            self._results[index] = finish_redistribute(self._steps.pop(index))
        return self._results.pop(index)


def start(
    locals_: Sequence[torch.Tensor], redistributions: Sequence[DifferentiableRedistribution]
) -> list[Callable[[], torch.Tensor]]:
    """Start a redistribution of each tensor; return a function for each that waits and returns the result.

    Call each returned function once. Every rank must call `start` and the returned functions in the same order.
    """
    started = _Started(redistributions)
    token = _Begin.apply(started, *locals_)  # type: ignore[no-untyped-call]
    return [partial(_End.apply, token, started, index) for index in range(len(redistributions))]


class _Started:
    """The redistributions that one call of `start` began, and their gradients in backward."""

    def __init__(self, redistributions: Sequence[DifferentiableRedistribution]) -> None:
        self._redistributions = redistributions
        self._gradients: dict[int, torch.Tensor] = {}
        self._task: int | None = None
        self._back: InFlight | None = None

    def start_forward(self, locals_: Sequence[torch.Tensor], need_gradient: Sequence[bool]) -> None:
        """Start the redistributions; `need_gradient` tells which tensors have a gradient."""
        self.need_gradient = {index for index, needed in enumerate(need_gradient) if needed}
        pairs = enumerate(zip(locals_, self._redistributions, strict=True))
        self.in_forward = InFlight({index: plan.steps(local, "forward") for index, (local, plan) in pairs})

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient from backward; the last gradient starts the collectives of all."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # drop the gradients that a failed backward left
            self._task, self._gradients, self._back = task, {}, None
        self._gradients[index] = gradient
        if self._gradients.keys() == self.need_gradient:
            self._start_backward()

    def gradients(self) -> list[torch.Tensor | None]:
        """Wait for the gradients; None stands for a gradient that this backward did not compute."""
        if self._back is None:
            self._start_backward()
        assert self._back is not None
        back, computed = self._back, self._gradients.keys()
        found = [back.end(index) if index in computed else None for index in range(len(self._redistributions))]
        self._gradients, self._back = {}, None
        return found

    def _start_backward(self) -> None:
        gradients = sorted(self._gradients.items())
        self._back = InFlight(
            {
                index: self._redistributions[index].steps(gradient.contiguous(), "backward")
                for index, gradient in gradients
            }
        )


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: _Started, *locals_: torch.Tensor) -> torch.Tensor:
        ctx.started = started
        started.start_forward(locals_, ctx.needs_input_grad[1:])
        return locals_[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.started.gradients()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor, started: _Started, index: int) -> torch.Tensor:
        ctx.started, ctx.index = started, index
        result = started.in_forward.end(index)
        if index not in started.need_gradient:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.started.add_gradient(ctx.index, gradient)
        return gradient.new_empty(0), None, None
