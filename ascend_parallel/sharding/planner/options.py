"""The options of each node on a mesh: all combinations of the strategies that its rule allows on each dimension.

Data parallelism along a mesh dimension keeps the options that shard tensors computed from inputs, and whole parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ascend_parallel.sharding.graph import CALL, INPUT, PARAMETER, Graph, Node, OpCall, TensorMeta, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, forward, is_even, shard
from ascend_parallel.sharding.rules import OpPlacements, experts, strategies
from ascend_parallel.sharding.rules import allowed as goes_together
from ascend_parallel.sharding.rules.axes import is_float

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
            even = self._even(call.inputs, option.inputs) and self._even(call.outputs, option.outputs)
            if even and goes_together(call, option.inputs):
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


def is_cut(option: Option, data: int, dim: int | None = None) -> bool:
    """Tell whether the outputs are sharded or partial along mesh dimension `data`; with `dim` sharded there.

    Outputs beside the first may be whole: the statistics of a batch norm, which are those of all ranks.
    """

    def fits(layout: Layout) -> bool:
        return layout[data] == shard(dim) if dim is not None else layout[data].kind in ("shard", "partial")

    main, *others = option.outputs
    return fits(main) and all(fits(layout) or layout[data] == REPLICATE for layout in others)


def is_whole(option: Option, data: int | None = None) -> bool:
    """Tell whether all tensors are whole on every mesh dimension; with `data` except for that."""
    return all(
        placement.kind in WHOLE or index == data
        for layout in (*option.inputs, *option.outputs)
        for index, placement in enumerate(layout)
    )


def signature(node: Node) -> Signature:
    """Return the cache key that nodes with the same options share."""
    if node.call is None:
        return (node.kind, node.outputs)
    call = node.call
    return (call.name, repr(call.args), repr(dict(call.kwargs)), call.inputs, call.outputs, call.sequence)


WHOLE = ("replicate", "partial_grad")
BATCH = shard(0)
REPEATING = tuple(f"aten.{name}." for name in ("repeat_interleave", "unsqueeze", "expand", "reshape", "view"))
ADDITIONS = ("aten.add.", "aten.add_.")


def data_parallel_options(
    graph: Graph,
    options: Mapping[str, Sequence[Option]],
    configured: Collection[str],
    semi_auto: bool,
    data: int,
    input_dim: int = 0,
) -> dict[str, Sequence[Option]]:
    """Return the options of each node that data parallelism along mesh dimension `data` allows.

    input_dim: 0, the batch, or 1, the sequence: the dimension along which inputs are sharded.

    Along `data`, inputs are sharded on `input_dim`, and tensors computed from inputs on any dimension, where
    possible; this includes configured operators, as far as their strategies allow. Parameters are held and read whole
    along `data`; what is computed from neither, such as a mask, is read whole or in slices of its first dimension, the
    batch. In semi-automatic mode, nodes that are not configured are whole on the other mesh dimensions, except
    for the parameters of configured operators.
    """
    allowed = dict(options)
    from_inputs, from_parameters = graph.computed_from(INPUT), graph.computed_from(PARAMETER)
    read = {value.node for name in configured for value in graph.nodes[name].inputs}
    for name, node in graph.nodes.items():
        kept = list(allowed[name])
        if name not in configured:
            kept = [option for option in kept if _partials_are_produced(allowed, node, option, data)]
            if semi_auto and name not in read:
                kept = [option for option in kept if is_whole(option, None if node.kind == PARAMETER else data)]
            elif node.kind == PARAMETER:
                kept = [option for option in kept if option.outputs[0][data].kind in WHOLE]
            elif semi_auto:
                kept = [option for option in kept if is_whole(option, data)]
        of_input = input_dim if node.kind == INPUT else None
        cut = [option for option in kept if name in from_inputs and is_cut(option, data, of_input)]
        if input_dim and node.kind == INPUT and not cut:
            kept = [option for option in kept if option.outputs[0][data].kind in WHOLE]
        others = {index: value for index, value in enumerate(node.inputs) if value.node not in from_inputs}
        own = {index for index, value in others.items() if value.node in from_parameters}
        as_wanted = [option for option in cut if _reads_others(node, option, others, own, data, input_dim)]
        # keys with fewer heads than queries are best gathered before they are repeated
        repeated = [option for option in kept if option not in cut] if input_dim and _repeats(node) else []
        allowed[name] = [*(as_wanted or cut or kept), *(repeated if cut else [])]
    return allowed


def expert_options(
    graph: Graph, options: Mapping[str, Sequence[Option]], along: int
) -> tuple[dict[str, Sequence[Option]], set[str]]:
    """Return the options in which tokens go to their experts along a mesh dimension, and the experts' weights.

    Each of the weights is held in slices there, and so is everything that is computed from weights of experts alone.
    Raises `ValueError` if the tokens of a mixture cannot go to its experts.
    """
    allowed, weights = dict(options), set[str]()
    for name, node in graph.nodes.items():
        if node.call is None or node.call.name != experts.CALL:
            continue
        allowed[name] = [option for option in options[name] if along in experts.exchange_dims(option.inputs)]
        if not allowed[name]:
            tokens, of_experts = node.call.inputs[experts.X].shape, node.call.inputs[experts.UP].shape
            raise ValueError(
                f"{node.module or 'the model'} has tokens {list(tokens)}, {of_experts[0]} experts: the mesh "
                "dimension of the experts has to divide both, and a strategy of this operator to allow the exchange"
            )
        weights |= graph.needed_for(node.inputs[experts.UP :])
    for name in weights:
        sliced = [option for option in allowed[name] if option.outputs[0][along] == shard(0)]
        allowed[name] = sliced or allowed[name]
    return allowed, weights


def _repeats(node: Node) -> bool:
    """Tell whether a node may belong to the repetition of a tensor, and computes nothing."""
    return node.call is not None and node.call.name.startswith(REPEATING)


def _reads_others(
    node: Node, option: Option, others: Collection[int], own: Collection[int], data: int, input_dim: int
) -> bool:
    """Tell whether what no input made is read as data parallelism wants it.

    What is computed from parameters (`own`, among `others`) is whole, but for positions added along a sequence. What is
    computed from neither is whole or in slices: of the batch, or of any dimension if the sequence is sharded.
    """

    def fits(index: int) -> bool:
        placement = option.inputs[index][data]
        if placement.kind in WHOLE:
            return True
        if index not in own:
            return placement == BATCH or input_dim > 0
        return input_dim > 0 and node.call is not None and node.call.name.startswith(ADDITIONS)

    return all(map(fits, others))


def with_batch_cut_only_by(
    graph: Graph, options: Mapping[str, Sequence[Option]], configured: Collection[str], data: Collection[int]
) -> dict[str, Sequence[Option]]:
    """Return the options in which only the mesh dimensions `data` shard the batch, of nodes that are not configured.

    The batch is the first dimension of every tensor computed from the inputs that is as long as the inputs' first.
    """
    sizes = {node.outputs[0].shape[0] for node in graph.inputs if node.outputs[0].shape}
    from_inputs, allowed = graph.computed_from(INPUT), dict(options)

    def cuts_batch(shape: Sequence[int], layout: Layout) -> bool:
        others = (placement for index, placement in enumerate(layout) if index not in data)
        return bool(shape) and shape[0] in sizes and any(placement == shard(0) for placement in others)

    for name in from_inputs.difference(configured):
        node = graph.nodes[name]
        kept = [
            option
            for option in allowed[name]
            if not any(map(cuts_batch, (meta.shape for meta in node.outputs), option.outputs))
            and not any(
                value.node in from_inputs and cuts_batch(graph.meta(value).shape, layout)
                for value, layout in zip(node.inputs, option.inputs, strict=True)
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


def differentiable_values(graph: Graph) -> frozenset[Value]:
    """Return the floating-point tensors computed from parameters, or from inputs traced with a gradient."""
    differentiable: set[Value] = set()
    for node in graph.nodes.values():
        is_source = node.kind == PARAMETER or node.name in graph.with_gradient
        if is_source or (node.kind == CALL and any(value in differentiable for value in node.inputs)):
            tensors = zip(node.values, node.outputs, strict=True)
            differentiable |= {value for value, meta in tensors if is_float(meta)}
    return frozenset(differentiable)
