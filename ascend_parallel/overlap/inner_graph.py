"""Autograd graphs inside an autograd function: of each group of parts whose backward runs between all-to-alls.

What the graphs keep for backward goes through the function's own ``save_for_backward``: activation checkpoints, hooks
on saved tensors and ``retain_graph`` act as on any function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks


class TensorLike:
    """The shape, dtype and device of a tensor, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Note what `tensor` is like."""
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def empty(self) -> torch.Tensor:
        """Return a tensor whose values are not set."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        """Return a tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class InnerSavedTensors:
    """What graphs inside an autograd function keep for backward, to be saved by the function itself.

    The graphs hold numbers in place of tensors. Parameters stay what they are: frameworks keep attributes on them, and
    they outlive the graph anyway.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._tensors: list[torch.Tensor] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect what the graphs that are built inside this context keep."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def give(self) -> list[torch.Tensor]:
        """Return the collected tensors, and hold them no longer."""
        tensors, self._tensors = self._tensors, []
        return tensors

    @contextmanager
    def given(self, tensors: list[torch.Tensor]) -> Iterator[None]:
        """Let the graphs read `tensors`, as `give` has returned them, inside this context."""
        self._tensors = tensors
        try:
            yield
        finally:
            self._tensors = []

    def _pack(self, tensor: torch.Tensor) -> int | tuple[torch.Tensor, int]:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor, tensor._version
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def _unpack(self, packed: int | tuple[torch.Tensor, int]) -> torch.Tensor:
        if isinstance(packed, int):
            return self._tensors[packed]
        parameter, version = packed
        if parameter._version != version:
            raise RuntimeError(
                f"a parameter {list(parameter.shape)} was changed in place between forward and backward: "
                f"it is at version {parameter._version}, and forward read version {version}"
            )
        return parameter


class InnerGraph:
    """The autograd graph of a function that is called inside another autograd function's forward.

    It holds edges of the graph in place of tensors, so that hooks on saved tensors decide what stays in memory.
    """

    def __init__(self, saved: InnerSavedTensors, graded: bool, *, whole_backward: bool) -> None:
        """Build a graph if `graded`.

        whole_backward
            `gradients` runs all of the graph's backward: for functions that read parameters, which get theirs then,
            or that compute all of their gradients in one piece anyway.
        """
        self._saved, self._graded, self._whole_backward = saved, graded, whole_backward
        self._boxes: list[list[torch.Tensor]] = []  # of the inputs that need a gradient
        self._result: GradientEdge | None = None
        self._inputs: list[tuple[TensorLike, GradientEdge | None]] = []

    @property
    def needs_backward(self) -> bool:
        """Whether the result requires a gradient."""
        return self._result is not None

    def run(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> torch.Tensor:
        """Return ``function(*inputs)``, detached; `needs` tells of which inputs gradients will be asked for."""
        with torch.set_grad_enabled(self._graded), self._saved.collecting():
            given = [self._source(x) if need else x.detach() for x, need in zip(inputs, needs, strict=True)]
            y = function(*given)
        self._inputs = [(TensorLike(x), get_gradient_edge(x) if x.requires_grad else None) for x in given]
        self._result = get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def _source(self, x: torch.Tensor) -> torch.Tensor:
        """Return x at the beginning of the graph.

        Each input has a node of its own: the engine computes what any input of a node needs, although it is asked for
        another.
        """
        self._boxes.append([])
        # Detached: an input may have a graph outside, where this graph's backward must not go on.
        anchor, x = torch.empty(0, requires_grad=True), x.detach()
        source: torch.Tensor = _Source.apply(self._boxes[-1], anchor, x)  # type: ignore[no-untyped-call]
        return source

    def gradients(self, dy: torch.Tensor, which: range) -> list[torch.Tensor]:
        """Return the gradients of the inputs with the numbers `which`; zeros for inputs that were not read.

        May be called again, for other inputs, unless the whole backward runs at each call.
        """
        likes, edges = zip(*(self._inputs[index] for index in which), strict=True)
        found: list[torch.Tensor | None] = [None] * len(edges)
        if self._result is not None and self._whole_backward:
            torch.autograd.backward([self._result], [dy], retain_graph=_keeps_graph())
            boxes = iter(self._boxes)
            own = [next(boxes) if edge is not None else [] for edge in edges]
            found = [box.pop() if box else None for box in own]
        elif self._result is not None and (wanted := [edge for edge in edges if edge is not None]):
            gradients = iter(torch.autograd.grad([self._result], wanted, [dy], retain_graph=True, allow_unused=True))
            found = [next(gradients) if edge is not None else None for edge in edges]
        return [like.zeros() if dx is None else dx for like, dx in zip(likes, found, strict=True)]


def _keeps_graph() -> bool:
    """Tell whether the backward that runs now keeps its graph (retain_graph).

    A function that torch.compile has compiled refuses a backward that does, as it writes over what it has saved.
    """
    keeps: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return keeps()


class _Source(torch.autograd.Function):
    """The beginning of an inner graph: passes a tensor on, and puts its gradient into a box."""

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, None, None]:
        ctx.box[:] = [dx]
        return None, None, None
