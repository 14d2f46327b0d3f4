"""Conversions that start at one place of a forward and are read later; in backward they end where they began.

Autograd sees two functions. `begin` takes the tensors and gives a token of no elements, which orders it before `end`;
`end` gives a tensor. In backward `end` hands over the gradient, and the last of them starts the collectives back;
`begin`, which comes after the backward of all that ran between the two, waits and returns the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.redistribute.collectives import CoalescedCollective, Request
from ascend_parallel.sharding.redistribute.redistribute_local import RequestGenerator, finish_redistribute
from ascend_parallel.sharding.runtime.redistribute_autograd import Ways


class InFlight:
    """Conversions whose first collectives run as one, where they are alike."""

    def __init__(self, ways: dict[int, RequestGenerator]) -> None:
        """Start them; they are known by a number."""
        self._ways, self._results = ways, dict[int, torch.Tensor]()
        alike: dict[Hashable, dict[int, Request]] = {}
        for index, way in ways.items():
            try:
                request = next(way)
            except StopIteration as stop:
                self._results[index] = stop.value
            else:
                alike.setdefault(request.coalesce_key, {})[index] = request
        self._joint: dict[int, CoalescedCollective] = {}
        for requests in alike.values():
            self._joint |= dict.fromkeys(requests, CoalescedCollective(list(requests.values())))

    def end(self, index: int) -> torch.Tensor:
        """Wait for a conversion, and return what it gives; once for each."""
        if index in self._joint:
            self._joint.pop(index).wait()
            self._results[index] = finish_redistribute(self._ways.pop(index))
        return self._results.pop(index)


def start(locals_: Sequence[torch.Tensor], ways: Sequence[Ways]) -> list[Callable[[], torch.Tensor]]:
    """Start conversions of tensors; return what waits for each and gives it, to be called once.

    Every rank has to call it alike, and what it returns in the same order.
    """
    started = _Started(ways)
    token = _Begin.apply(started, *locals_)  # type: ignore[no-untyped-call]
    return [partial(_End.apply, token, started, index) for index in range(len(ways))]


class _Started:
    """Conversions that were started, of one forward."""

    def __init__(self, ways: Sequence[Ways]) -> None:
        self._ways = ways
        self._gradients: dict[int, torch.Tensor] = {}
        self._task: int | None = None
        self._back: InFlight | None = None

    def go(self, locals_: Sequence[torch.Tensor], wanted: Sequence[bool]) -> None:
        """Start the conversions; `wanted` tells which tensors have a gradient."""
        self.wanted = {index for index, wants in enumerate(wanted) if wants}
        pairs = zip(locals_, self._ways, strict=True)
        self.ahead = InFlight({index: way.going(one, "forward") for index, (one, way) in enumerate(pairs)})

    def arrived(self, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient that backward brings; the last one starts all."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what a backward that failed has left is none of this one's
            self._task, self._gradients, self._back = task, {}, None
        self._gradients[index] = gradient
        if self._gradients.keys() == self.wanted:
            self._start_back()

    def gradients(self) -> list[torch.Tensor | None]:
        """Wait for the gradients, None for those that this backward did not bring."""
        if self._back is None:
            self._start_back()
        assert self._back is not None
        back, there = self._back, self._gradients.keys()
        found = [back.end(index) if index in there else None for index in range(len(self._ways))]
        self._gradients, self._back = {}, None
        return found

    def _start_back(self) -> None:
        gradients = sorted(self._gradients.items())
        self._back = InFlight(
            {index: self._ways[index].going(one.contiguous(), "backward") for index, one in gradients}
        )


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: _Started, *locals_: torch.Tensor) -> torch.Tensor:
        ctx.started = started
        started.go(locals_, ctx.needs_input_grad[1:])
        return locals_[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.started.gradients()


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor, started: _Started, index: int) -> torch.Tensor:
        ctx.started, ctx.index = started, index
        result = started.ahead.end(index)
        if index not in started.wanted:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.started.arrived(ctx.index, gradient)
        return gradient.new_empty(0), None, None
