"""The options of each node on a mesh: all combinations of the strategies that its rule allows on each dimension.

Data parallelism along a mesh dimension keeps the options that shard tensors computed from inputs, and whole parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ascend_parallel.sharding.graph import CALL, INPUT, PARAMETER, Graph, Node, OpCall, TensorMeta
from ascend_parallel.sharding.layout import REPLICATE, Layout, forward, is_even, shard
from ascend_parallel.sharding.rules import OpPlacements, strategies

Signature = tuple[object, ...]


@dataclass(frozen=True)
class Option:
    """Layouts of a node's inputs and outputs."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


class Options:
    """Computes the options of nodes on a mesh, cached by operator signature."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        """Take the size of each mesh dimension."""
        self._mesh_shape = mesh_shape
        self._known: dict[Signature, tuple[Option, ...]] = {}

    def of(self, node: Node, gradients: Sequence[bool]) -> tuple[Option, ...]:
        """Return the options of a node, all replicate first; even layouts only.

        gradients: whether each input has a gradient, then whether the outputs have. Without a gradient partial_grad
        becomes replicate.
        """
        key = (*signature(node), tuple(gradients))
        if key not in self._known:
            options = (_without_gradients(option, gradients) for option in self._all(node))
            self._known[key] = tuple(dict.fromkeys(options))
        return self._known[key]

    def _all(self, node: Node) -> Iterable[Option]:
        if node.kind == CALL:
            assert node.call is not None
            return self._on_mesh(node.call, strategies(node.call))
        (meta,) = node.outputs
        placements = [REPLICATE, *(shard(dim) for dim, size in enumerate(meta.shape) if size > 1)]
        layouts = product(placements, repeat=len(self._mesh_shape))
        return (Option((), (layout,)) for layout in layouts if is_even(meta.shape, layout, self._mesh_shape))

    def _on_mesh(self, call: OpCall, single: list[OpPlacements]) -> Iterable[Option]:
        """Yield every combination of one strategy per mesh dimension in which all layouts are even."""
        single = list(dict.fromkeys(single))
        fitting = [[strategy for strategy in single if self._fits(call, strategy, size)] for size in self._mesh_shape]
        for chosen in product(*fitting):
            option = Option(
                tuple(zip(*(strategy.inputs for strategy in chosen), strict=True)),
                tuple(zip(*(strategy.outputs for strategy in chosen), strict=True)),
            )
            if self._even(call.inputs, option.inputs) and self._even(call.outputs, option.outputs):
                yield option

    @staticmethod
    def _fits(call: OpCall, strategy: OpPlacements, size: int) -> bool:
        inputs = zip(call.inputs, strategy.inputs, strict=True)
        pairs = (*inputs, *zip(call.outputs, strategy.outputs, strict=True))
        return all(placed.kind != "shard" or meta.shape[placed.dim] % size == 0 for meta, placed in pairs)

    def _even(self, metas: tuple[TensorMeta, ...], layouts: tuple[Layout, ...]) -> bool:
        return all(is_even(meta.shape, layout, self._mesh_shape) for meta, layout in zip(metas, layouts, strict=True))


def _without_gradients(option: Option, gradients: Sequence[bool]) -> Option:
    """Return the option with replicate instead of partial_grad for tensors without a gradient."""
    *of_inputs, of_outputs = gradients
    inputs = tuple(layout if has else forward(layout) for layout, has in zip(option.inputs, of_inputs, strict=True))
    return Option(inputs, option.outputs if of_outputs else tuple(map(forward, option.outputs)))


def without_partials(options: Sequence[Option], whole: Sequence[bool]) -> list[Option]:
    """Return the options that read no whole tensor as partial; `whole` tells which inputs are whole."""

    def is_partial(layout: Layout) -> bool:
        return any(placement.kind == "partial" for placement in layout)

    return [
        option
        for option in options
        if not any(fixed and is_partial(layout) for fixed, layout in zip(whole, option.inputs, strict=True))
    ]


def is_cut(option: Option, data: int, first: bool) -> bool:
    """Tell whether all outputs are sharded or partial along mesh dimension `data`; with `first` sharded on dim 0."""
    kinds = ("shard",) if first else ("shard", "partial")
    return all(layout[data].kind in kinds and not (first and layout[data].dim) for layout in option.outputs)


def is_whole(option: Option, data: int, also_there: bool) -> bool:
    """Tell whether all tensors are whole on every mesh dimension except `data`; with `also_there` also on `data`."""
    return all(
        placement.kind in ("replicate", "partial_grad") or (index == data and not also_there)
        for layout in (*option.inputs, *option.outputs)
        for index, placement in enumerate(layout)
    )


def signature(node: Node) -> Signature:
    """Return the cache key that nodes with the same options share."""
    if node.call is None:
        return (node.kind, node.outputs)
    call = node.call
    return (call.name, repr(call.args), repr(dict(call.kwargs)), call.inputs, call.outputs)


WHOLE = ("replicate", "partial_grad")


def data_parallel_options(
    graph: Graph,
    options: Mapping[str, Sequence[Option]],
    configured: Collection[str],
    semi_auto: bool,
    data: int,
) -> dict[str, Sequence[Option]]:
    """Return the options of each node that data parallelism along mesh dimension `data` allows.

    Along `data`, inputs are sharded on their first dimension, and tensors computed from inputs on any dimension, where
    possible; this includes configured operators, as far as their strategies allow. Parameters are held and read whole
    along `data`. In semi-automatic mode, nodes that are not configured are whole on the other mesh dimensions, except
    for the parameters of configured operators.
    """
    allowed = dict(options)
    from_inputs: set[str] = set()
    read = {value.node for name in configured for value in graph.nodes[name].inputs}
    for name, node in graph.nodes.items():
        if node.kind == INPUT or any(value.node in from_inputs for value in node.inputs):
            from_inputs.add(name)
        kept = list(allowed[name])
        if name not in configured:
            kept = [option for option in kept if _partials_are_produced(allowed, node, option, data)]
            if semi_auto and name not in read:
                kept = [option for option in kept if is_whole(option, data, node.kind == PARAMETER)]
            elif node.kind == PARAMETER:
                kept = [option for option in kept if option.outputs[0][data].kind in WHOLE]
            elif semi_auto:
                kept = [option for option in kept if is_whole(option, data, False)]
        cut = [option for option in kept if name in from_inputs and is_cut(option, data, node.kind == INPUT)]
        others = [index for index, value in enumerate(node.inputs) if value.node not in from_inputs]
        of_batch = [option for option in cut if all(option.inputs[index][data].kind in WHOLE for index in others)]
        allowed[name] = of_batch or cut or kept
    return allowed


def with_batch_cut_only_by(
    graph: Graph, options: Mapping[str, Sequence[Option]], configured: Collection[str], data: int
) -> dict[str, Sequence[Option]]:
    """Return the options in which no mesh dimension but `data` shards the batch, of nodes that are not configured.

    The batch is the first dimension of every tensor computed from the inputs that is as long as the inputs' first.
    """
    sizes = {node.outputs[0].shape[0] for node in graph.inputs if node.outputs[0].shape}
    from_inputs: set[str] = set()
    allowed = dict(options)

    def cuts_batch(shape: Sequence[int], layout: Layout) -> bool:
        others = (placement for index, placement in enumerate(layout) if index != data)
        return bool(shape) and shape[0] in sizes and any(placement == shard(0) for placement in others)

    for name, node in graph.nodes.items():
        if node.kind == INPUT or any(value.node in from_inputs for value in node.inputs):
            from_inputs.add(name)
            if name in configured:
                continue
            reads = [value.node in from_inputs for value in node.inputs]
            kept = [
                option
                for option in allowed[name]
                if not any(map(cuts_batch, (meta.shape for meta in node.outputs), option.outputs))
                and not any(
                    inside and cuts_batch(graph.meta(value).shape, layout)
                    for inside, value, layout in zip(reads, node.inputs, option.inputs, strict=True)
                )
            ]
            allowed[name] = kept or allowed[name]
    return allowed


def _partials_are_produced(allowed: Mapping[str, Sequence[Option]], node: Node, option: Option, data: int) -> bool:
    """Tell whether each partial tensor that `option` reads along mesh dimension `data` is produced as partial."""
    return all(
        layout[data].kind != "partial"
        or layout[data] in {produced.outputs[value.index][data] for produced in allowed[value.node]}
        for value, layout in zip(node.inputs, option.inputs, strict=True)
    )
