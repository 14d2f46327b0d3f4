"""What can be chosen for each node of a graph on a mesh: the product of what its rule allows on each dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from ascend_parallel.sharding.graph import CALL, Node, OpCall, TensorMeta
from ascend_parallel.sharding.layout import REPLICATE, Layout, Placement, forward, is_even, shard
from ascend_parallel.sharding.rules import OpPlacements, strategies

Signature = tuple[object, ...]


@dataclass(frozen=True)
class Option:
    """Layouts of a node's inputs and outputs."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class Options:
    """Remembers the options of every operator signature on one mesh."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        """Take the size of each mesh dimension."""
        self._mesh_shape = mesh_shape
        self._known: dict[Signature, tuple[Option, ...]] = {}

    def of(self, node: Node, gradients: Sequence[bool]) -> tuple[Option, ...]:
        """Return the options of a node, the replicated one first; even layouts only.

        gradients: whether each input, and at last the outputs, has one. Where it has none a copy is a replica.
        """
        key = (*signature(node), tuple(gradients))
        if key not in self._known:
            self._known[key] = tuple(dict.fromkeys(_plain(one, gradients) for one in self._made(node)))
        return self._known[key]

    def _made(self, node: Node) -> Iterable[Option]:
        if node.kind == CALL:
            assert node.call is not None
            return self._on_mesh(node.call, strategies(node.call))
        (meta,) = node.outputs
        states = [REPLICATE, *(shard(dim) for dim, size in enumerate(meta.shape) if size > 1)]
        layouts = product(states, repeat=len(self._mesh_shape))
        return (Option((), (layout,)) for layout in layouts if is_even(meta.shape, layout, self._mesh_shape))

    def _on_mesh(self, call: OpCall, single: list[OpPlacements]) -> Iterable[Option]:
        """Combine one strategy per mesh dimension where every tensor is cut evenly."""
        single = list(dict.fromkeys(single))
        fitting = [[one for one in single if self._fits(call, one, size)] for size in self._mesh_shape]
        for chosen in product(*fitting):
            option = Option(
                _layouts(len(call.inputs), [one.inputs for one in chosen]),
                _layouts(len(call.outputs), [one.outputs for one in chosen]),
            )
            if self._even(call.inputs, option.inputs) and self._even(call.outputs, option.outputs):
                yield option

    @staticmethod
    def _fits(call: OpCall, one: OpPlacements, size: int) -> bool:
        pairs = (*zip(call.inputs, one.inputs, strict=True), *zip(call.outputs, one.outputs, strict=True))
        return all(state.kind != "shard" or meta.shape[state.dim] % size == 0 for meta, state in pairs)

    def _even(self, metas: tuple[TensorMeta, ...], layouts: tuple[Layout, ...]) -> bool:
        return all(is_even(meta.shape, one, self._mesh_shape) for meta, one in zip(metas, layouts, strict=True))


def _plain(option: Option, gradients: Sequence[bool]) -> Option:
    """Call a copy whose gradient nobody computes a replica."""
    *of_inputs, of_outputs = gradients
    inputs = tuple(one if has else forward(one) for one, has in zip(option.inputs, of_inputs, strict=True))
    return Option(inputs, option.outputs if of_outputs else tuple(map(forward, option.outputs)))


def without_parts(options: Sequence[Option], whole: Sequence[bool]) -> list[Option]:
    """Leave out options that read as a partial sum what is whole."""

    def is_part(layout: Layout) -> bool:
        return any(state.kind == "partial" for state in layout)

    return [
        option
        for option in options
        if not any(fixed and is_part(one) for fixed, one in zip(whole, option.inputs, strict=True))
    ]


def is_cut(option: Option, data: int, first: bool) -> bool:
    """Tell whether all outputs are cut or partial along a mesh dimension; cut along their first one."""
    kinds = ("shard",) if first else ("shard", "partial")
    return all(layout[data].kind in kinds and not (first and layout[data].dim) for layout in option.outputs)


def is_whole(option: Option, data: int, also_there: bool) -> bool:
    """Tell whether nothing is cut or partial but along one mesh dimension, or not even there."""
    return all(
        state.kind in ("replicate", "partial_grad") or (index == data and not also_there)
        for layout in (*option.inputs, *option.outputs)
        for index, state in enumerate(layout)
    )


def signature(node: Node) -> Signature:
    """Return what nodes with the same options have in common."""
    if node.call is None:
        return (node.kind, node.outputs)
    call = node.call
    return (call.name, repr(call.args), repr(dict(call.kwargs)), call.inputs, call.outputs)


def _layouts(count: int, states: list[tuple[Placement, ...]]) -> tuple[Layout, ...]:
    """Turn states by mesh dimension and tensor into layouts by tensor."""
    return tuple(tuple(one[index] for one in states) for index in range(count))
