"""The graph of a micro-batch of any rows, from traces of a few: sizes and numbers in it grow evenly with the rows.

Two traces give each size's growth. A third confirms that the model's graph grows so; otherwise every number of rows is
traced. A micro-batch of one row is always traced: sizes of 1 are special (broadcasts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CONSTANT, Graph, Node, OpCall, TensorMeta
from ascend_parallel.training.degrees.folding import FoldedGraph

# The rows of the two traces, and of the third.
FROM, CONFIRMING = (2, 4), 8


class UnevenError(ValueError):
    """Two graphs differ in more than sizes, or a size is not whole."""


class GraphFamily:
    """Folded graphs by rows; traces as few as it can."""

    def __init__(self, trace: Callable[[int], FoldedGraph]) -> None:
        """Take the function that traces a micro-batch."""
        self._trace, self._known = trace, dict[int, FoldedGraph]()
        self._grows: bool | None = None

    def at(self, rows: int) -> FoldedGraph:
        """Return the graph of `rows` rows."""
        if rows > CONFIRMING and self.grows:
            first, second = (self._traced(size) for size in FROM)
            return replace(first, graph=rescaled(first.graph, second.graph, LinearFit(*FROM, rows)))
        return self._traced(rows)

    @property
    def grows(self) -> bool:
        """Whether the third trace is what the first two give."""
        if self._grows is None:
            first, second, third = (self._traced(size) for size in (*FROM, CONFIRMING))
            try:
                made = rescaled(first.graph, second.graph, LinearFit(*FROM, CONFIRMING))
                same = list(made.nodes.values()) == list(third.graph.nodes.values())
                self._grows = same and bool((first.sequence == third.sequence).all())
            except UnevenError:
                self._grows = False
        return self._grows

    def _traced(self, rows: int) -> FoldedGraph:
        if rows not in self._known:
            self._known[rows] = self._trace(rows)
        return self._known[rows]


@dataclass(frozen=True)
class LinearFit:
    """From the numbers at `first` and `second` rows to that at `rows`."""

    first: int
    second: int
    rows: int

    def of(self, less: Any, more: Any) -> Any:
        """Return a leaf of a call's arguments; raise `UnevenError` for other differences than of whole numbers."""
        if type(less) is type(more) and less == more:
            return less
        if type(less) is not int or type(more) is not int:
            raise UnevenError(f"{less!r} at {self.first} rows, {more!r} at {self.second}")
        value, rest = divmod((more - less) * (self.rows - self.first), self.second - self.first)
        if rest:
            raise UnevenError(f"{less} at {self.first} rows, {more} at {self.second}")
        return less + value

    def meta(self, less: TensorMeta, more: TensorMeta) -> TensorMeta:
        """Return a tensor's shape."""
        if len(less.shape) != len(more.shape) or less.dtype != more.dtype:
            raise UnevenError(f"{less} and {more}")
        return TensorMeta(tuple(map(self.of, less.shape, more.shape)), less.dtype)

    def metas(self, less: tuple[TensorMeta, ...], more: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
        """Return the shapes of several tensors."""
        if len(less) != len(more):
            raise UnevenError("another number of tensors")
        return tuple(map(self.meta, less, more))

    def call(self, less: OpCall, more: OpCall) -> OpCall:
        """Return a call with its arguments."""
        first, spec = pytree.tree_flatten((less.args, dict(less.kwargs)))
        second, other = pytree.tree_flatten((more.args, dict(more.kwargs)))
        if less.target != more.target or spec != other:
            raise UnevenError(f"{less.name} and {more.name}")
        args, kwargs = pytree.tree_unflatten(list(map(self.of, first, second)), spec)
        return OpCall(
            less.target, args, kwargs, self.metas(less.inputs, more.inputs), self.metas(less.outputs, more.outputs)
        )

    def node(self, less: Node, more: Node) -> Node:
        """Return a node."""
        if (less.kind, less.inputs, less.source) != (more.kind, more.inputs, more.source):
            raise UnevenError(f"{less.name} reads other tensors")
        outputs = self.metas(less.outputs, more.outputs)
        if less.kind == CONSTANT and outputs != less.outputs:
            raise UnevenError(f"the constant {less.name} grows")
        call = None if less.call is None or more.call is None else self.call(less.call, more.call)
        return replace(less, outputs=outputs, call=call)


def rescaled(less: Graph, more: Graph, growth: LinearFit) -> Graph:
    """Return the graph at `growth.rows` rows; raises `UnevenError` if the two differ in more than sizes."""
    if list(less.nodes) != list(more.nodes):
        raise UnevenError("the graphs have other operators")
    nodes = {name: growth.node(node, more.nodes[name]) for name, node in less.nodes.items()}
    return replace(less, nodes=nodes, calls="the graph is rescaled")
