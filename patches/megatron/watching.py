"""Observe the tensors from which a layer's backward starts, and its gradients, without changing its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ascend_parallel.overlap.weight_gradient import WeightGradient

WrapGradient = Callable[[WeightGradient], WeightGradient]
Begin = Callable[[torch.Tensor | None, torch.Tensor | None], None]


def unwrapped(gradient: WeightGradient) -> WeightGradient:
    """Return `gradient` itself: the wrapper of calls that are not checked."""
    return gradient


def notify_backward_start(begin: Begin) -> WrapGradient:
    """Return a wrapper that calls ``begin(kept, weight)`` when backward starts; `kept` is x or its gathered rows."""
    return lambda gradient: _NotifyingGradient(gradient, begin)


def gradient_source(y: torch.Tensor, x: torch.Tensor, operands: Iterable[torch.Tensor]) -> tuple[Any, int]:
    """Return the graph node that computes the gradient of x, and the index of this gradient among its outputs.

    Searches from y; does not search behind `operands`. Hooking an alias of x would be simpler, but the layer would then
    save the alias, and hooks and swaps of ``x.data`` would act differently from a run without the check.
    """
    target = get_gradient_edge(x)
    seen = {get_gradient_edge(operand).node for operand in operands if operand.requires_grad}
    pending: list[Any] = [y.grad_fn]
    while pending:
        node = pending.pop()
        for index, (next_node, output_nr) in enumerate(node.next_functions):
            if next_node is target.node and output_nr == target.output_nr:
                return node, index
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)
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
