"""Autograd graphs inside an autograd function: of each group of parts whose backward runs between all-to-alls.

What the graphs keep for backward goes through the function's own ``save_for_backward``: activation checkpoints, hooks
on saved tensors and ``retain_graph`` act as on any function.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

_ACCUMULATE_GRAD: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

# Readers of a tensor whose gradients `ReadersApart` adds one by one; those of further readers are summed before.
MOST_READERS = 64


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
        self._given = False

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
        self._tensors, self._given = tensors, True
        try:
            yield
        finally:
            self._tensors, self._given = [], False

    def check_given(self) -> None:
        """Raise `RuntimeError` outside of `given`, where a backward from outside has come into one of the graphs."""
        if not self._given:
            raise RuntimeError(
                "a gradient reached a tensor that experts or heads of attention computed in groups, on another way "
                "than by the layer's output: a hook or a module kept the tensor for a loss. Its gradient would be "
                "lost. Return the loss with the output (torch.autograd.Function), or set COC_PARALLEL_NUM=1"
            )

    def _pack(self, tensor: torch.Tensor) -> int | tuple[torch.Tensor, int]:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor, tensor._version
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def _unpack(self, packed: int | tuple[torch.Tensor, int]) -> torch.Tensor:
        if isinstance(packed, int):
            self.check_given()
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
        self._anchors: list[torch.Tensor] = []  # a leaf for each of them
        self._leaves: dict[int, torch.Tensor] | None = None
        self._apart: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # leaves: own, and left out
        self._dy: torch.Tensor | None = None
        self._result: GradientEdge | None = None
        self._inputs: list[tuple[TensorLike, GradientEdge | None]] = []
        self._hooked: list[bool] = []  # which inputs have hooks on their gradients

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
        self._hooked = [bool(x._backward_hooks) for x in given]
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
        self._anchors.append(anchor)
        source: torch.Tensor = _Source.apply(self._boxes[-1], self._saved, anchor, x)  # type: ignore[no-untyped-call]
        return source

    def gradients(self, dy: torch.Tensor, which: range) -> list[torch.Tensor]:
        """Return the gradients of the inputs with the numbers `which`; zeros for inputs that were not read.

        May be called again, for other inputs, unless the whole backward runs at each call.
        """
        likes, edges = zip(*(self._inputs[index] for index in which), strict=True)
        found: list[torch.Tensor | None] = [None] * len(edges)
        if self._apart is not None:
            self._dy = dy
        if self._result is not None and self._whole_backward:
            if self._apart is None:
                torch.autograd.backward([self._result], [dy], retain_graph=_keeps_graph())
            elif inputs := [*self._anchors, *self._apart[0]]:
                torch.autograd.backward([self._result], [dy], retain_graph=True, inputs=inputs)
            boxes = iter(self._boxes)
            own = [next(boxes) if edge is not None else [] for edge in edges]
            found = [box.pop() if box else None for box in own]
        elif self._result is not None and (wanted := [edge for edge in edges if edge is not None]):
            gradients = iter(torch.autograd.grad([self._result], wanted, [dy], retain_graph=True, allow_unused=True))
            found = [next(gradients) if edge is not None else None for edge in edges]
        return [like.zeros() if dx is None else dx for like, dx in zip(likes, found, strict=True)]

    def leaves(self) -> dict[int, torch.Tensor]:
        """Return the leaves that get gradients in the graph, by id: parameters that its function reads by itself."""
        if self._leaves is None:
            anchors = set(map(id, self._anchors))
            nodes = () if self._result is None else _nodes_behind(self._result.node)
            leaves = (node.variable for node in nodes if isinstance(node, _ACCUMULATE_GRAD))
            self._leaves = {id(leaf): leaf for leaf in leaves if id(leaf) not in anchors}
        return self._leaves

    def leave_out(self, leaves: Mapping[int, torch.Tensor]) -> None:
        """Have `gradients` leave out these leaves: they get theirs in `backward_together`."""
        own = self.leaves()
        if left_out := [leaf for key, leaf in own.items() if key in leaves]:
            self._apart = [leaf for key, leaf in own.items() if key not in leaves], left_out

    def readers_apart(self, index: int) -> list[torch.Tensor]:
        """Return a list that gets the gradients of an input from each of its readers, in autograd's order.

        Empty after backward: the input has one reader, or a hook of its own, which sees the sum.
        """
        gradients: list[torch.Tensor] = []
        _, edge = self._inputs[index]
        if edge is None or self._result is None or self._hooked[index]:
            return gradients
        readers = [
            (node, places)
            for node in _nodes_behind(self._result.node)
            if (places := [place for place, (behind, _) in enumerate(node.next_functions) if behind is edge.node])
        ]
        if sum(len(places) for _, places in readers) > 1:
            for node, places in readers:
                node.register_hook(functools.partial(_collect, gradients, places))
        return gradients


def leaves_of_several(graphs: Sequence[InnerGraph]) -> dict[int, torch.Tensor]:
    """Return the leaves, by id, that more than one of the graphs reads."""
    counts = Counter(key for graph in graphs for key in graph.leaves())
    return {key: leaf for graph in graphs for key, leaf in graph.leaves().items() if counts[key] > 1}


def backward_together(graphs: Sequence[InnerGraph]) -> None:
    """Give the leaves that were left out of the graphs' backward their gradients, once, with their hooks.

    All graphs run as one, in the order of autograd: the part of each that leads to these leaves runs again.
    """
    left = [(graph, graph._apart[1]) for graph in graphs if graph._apart is not None and graph._dy is not None]
    if not left:
        return
    results = [graph._result for graph, _ in left if graph._result is not None]  # with leaves there is one
    torch.autograd.backward(
        results,
        [graph._dy for graph, _ in left],
        retain_graph=_keeps_graph(),
        inputs=list({id(leaf): leaf for _, leaves in left for leaf in leaves}.values()),
    )
    for graph, _ in left:
        graph._dy = None


def _nodes_behind(node: Node) -> Iterator[Node]:
    """Yield the nodes of a graph, from its last on."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)


def _collect(
    gradients: list[torch.Tensor], places: Sequence[int], inputs: Sequence[torch.Tensor | None], _: object
) -> None:
    """Add what a node has computed for the inputs at `places` to `gradients`."""
    gradients += [dx for place in places if (dx := inputs[place]) is not None]


class ReadersApart:
    """A tensor for a function that runs the backward of the tensor's readers itself.

    Autograd adds the gradients of a tensor's readers one by one, those of readers behind such a function too. A
    function that returned their sum would have them added in another order.

    x
        A view of the tensor, whose place in the order of backward is that of this call.
    gradients
        What `x` gets from each reader, in their order: the function fills it in its backward, or leaves it empty.
    """

    def __init__(self, x: torch.Tensor) -> None:
        """Make the view of `x`."""
        self.gradients: list[torch.Tensor] = []
        copies = [x] * (MOST_READERS - 1) if x.requires_grad else []
        self.x: torch.Tensor = _ReadersApart.apply(self.gradients, x, *copies)  # type: ignore[no-untyped-call]


class _ReadersApart(torch.autograd.Function):
    """Has an edge to the tensor's producer for each reader."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], x: torch.Tensor, *copies: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.gradients or [dx]
        apart, summed = gradients[: MOST_READERS - 1], gradients[MOST_READERS - 1 :]
        found = [*apart, functools.reduce(torch.add, summed)] if summed else apart
        ctx.gradients.clear()
        return None, *found, *[None] * (MOST_READERS - len(found))


def _keeps_graph() -> bool:
    """Tell whether the backward that runs now keeps its graph (retain_graph).

    A function that torch.compile has compiled refuses a backward that does, as it writes over what it has saved.
    """
    keeps: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return keeps()


class _Source(torch.autograd.Function):
    """The beginning of an inner graph: passes a tensor on, and puts its gradient into a box."""

    @staticmethod
    def forward(
        ctx: Any, box: list[torch.Tensor], saved: InnerSavedTensors, anchor: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.box, ctx.saved = box, saved
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.saved.check_given()
        ctx.box[:] = [dx]
        return None, None, None, None
