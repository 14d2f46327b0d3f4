"""Seeing what a layer's backward begins with and which gradients it gives, while it runs on its own operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ascend_parallel.overlap.weight_gradient import WeightGradient

WrapGradient = Callable[[WeightGradient], WeightGradient]
Begin = Callable[[torch.Tensor | None, torch.Tensor | None], None]


def unwrapped(gradient: WeightGradient) -> WeightGradient:
    """Return what becomes of a weight gradient where there is no check."""
    return gradient


def notify_backward_start(begin: Begin) -> WrapGradient:
    """Have `begin` called with what backward begins with, x or its gathered rows and the weight."""
    return lambda gradient: _NotifyingGradient(gradient, begin)


def gradient_source(y: torch.Tensor, x: torch.Tensor, operands: Iterable[torch.Tensor]) -> tuple[Any, int]:
    """Return the node between y and x whose gradient goes to x, and its place there; behind `operands` is not looked.

    Not an alias of x, whose gradient could be seen as well: the layer would save that, and hooks and swaps of
    ``x.data`` would not meet what they meet without a check.
    """
    wanted = get_gradient_edge(x)
    seen = {get_gradient_edge(one).node for one in operands if one.requires_grad}
    waiting: list[Any] = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        for place, (behind, number) in enumerate(node.next_functions):
            if behind is wanted.node and number == wanted.output_nr:
                return node, place
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    raise AssertionError("the layer's output does not depend on its input")


class _NotifyingGradient(WeightGradient):
    def __init__(self, gradient: WeightGradient, begin: Begin) -> None:
        self._gradient, self._begin = gradient, begin

    def begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        self._gradient.begin(kept, weight)
        self._begin(kept, weight)

    def postpone(self, dy: torch.Tensor) -> bool:
        return self._gradient.postpone(dy)

    def placeholder(self, x: torch.Tensor) -> torch.Tensor | None:
        return self._gradient.placeholder(x)

    def compute(self, x_m: torch.Tensor, dy_m: torch.Tensor) -> torch.Tensor | None:
        return self._gradient.compute(x_m, dy_m)
