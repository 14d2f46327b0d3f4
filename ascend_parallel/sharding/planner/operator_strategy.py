"""Reads users' strategies of operators, finds the operators by pattern, and checks that the operators allow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ascend_parallel.sharding.graph import BUFFER, CALL, INPUT, PARAMETER, Graph, Node, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.options import Option


class StrategyError(ValueError):
    """An invalid strategy: no operator has its name, or the operator does not allow the placements."""


@dataclass(frozen=True)
class TensorPlacements:
    """Placements of a tensor, one per mesh dimension; `dims` is the number of tensor dimensions that the user named."""

    placements: tuple[Placement, ...]
    dims: int | None = None


@dataclass(frozen=True)
class OperatorStrategy:
    """Requested placements of an operator's inputs and outputs; None for an unspecified tensor."""

    inputs: tuple[TensorPlacements | None, ...] = ()
    outputs: tuple[TensorPlacements | None, ...] = ()

    def nearness(self, option: Option) -> int:
        """Return the number of tensors that have the requested placements in an option."""
        pairs = [*zip(self.inputs, option.inputs, strict=False), *zip(self.outputs, option.outputs, strict=False)]
        return sum(tensor is not None and _match([tensor], [layout]) for tensor, layout in pairs)

    def matches(self, option: Option) -> bool:
        """Tell whether an option has the requested placements."""
        return _match(self.inputs, option.inputs) and _match(self.outputs, option.outputs)

    def whole_on_one(self, mesh_shape: Sequence[int]) -> OperatorStrategy:
        """Return the same strategy with tensors replicated, not sharded, along mesh dimensions of one rank."""

        def replicated(tensor: TensorPlacements | None) -> TensorPlacements | None:
            if tensor is None:
                return None
            pairs = zip(tensor.placements, mesh_shape, strict=True)
            whole = (Replicate() if size == 1 and isinstance(each, Shard) else each for each, size in pairs)
            return replace(tensor, placements=tuple(whole))

        return OperatorStrategy(tuple(map(replicated, self.inputs)), tuple(map(replicated, self.outputs)))


def strategy(
    in_strategy: Sequence[Any] | None, out_strategy: Sequence[Any] | None, mesh: Mapping[str, int]
) -> OperatorStrategy:
    """Return the strategy that a user wrote for an operator.

    Each tensor is None (unspecified), a list of placements, one per mesh dimension, or a tuple as in MindSpore, one
    entry per tensor dimension: 1, None or "None" (not sharded), the name of a mesh dimension, several names in the
    order of the mesh, or a number of slices where only one mesh dimension has that size.

    mesh: sizes by name. Raises `StrategyError`.
    """
    for tensors in (in_strategy, out_strategy):
        if tensors is not None and not isinstance(tensors, (list, tuple)):
            raise StrategyError(f"{tensors!r}: give a list with an entry for every tensor")
    return OperatorStrategy(
        tuple(_placements(tensor, mesh) for tensor in in_strategy or ()),
        tuple(_placements(tensor, mesh) for tensor in out_strategy or ()),
    )


def _placements(tensor: Any, mesh: Mapping[str, int]) -> TensorPlacements | None:
    """Return a tensor's placements, one per mesh dimension, from the tensor's entry in a strategy; None for None."""
    if tensor is None:
        return None
    if isinstance(tensor, list):
        if len(tensor) != len(mesh) or not all(isinstance(placement, Placement) for placement in tensor):
            raise StrategyError(f"{tensor}: give a placement for each of the mesh dimensions {', '.join(mesh)}")
        if any(isinstance(placement, Shard) and placement.dim < 0 for placement in tensor):
            raise StrategyError(f"{tensor}: count the dimensions of a tensor from 0")
        return TensorPlacements(tuple(tensor))
    if not isinstance(tensor, tuple):
        raise StrategyError(
            f"{tensor!r} is no tensor's strategy: give a list of placements, a tuple of cuts per dimension, or None; "
            'an operator has a list of them, as in ([None, ("mp", 1)], None)'
        )
    placements: dict[str, Placement] = {}
    for dim, entry in enumerate(tensor):
        for name in _names(entry, mesh, tensor):
            if name in placements:
                raise StrategyError(f"{tensor} uses mesh dimension {name} twice: a tensor is cut once along each")
            placements[name] = Shard(dim)
    return TensorPlacements(tuple(placements.get(name, Replicate()) for name in mesh), len(tensor))


def _names(entry: Any, mesh: Mapping[str, int], tensor: tuple[Any, ...]) -> list[str]:
    """Return the mesh dimensions that an entry of a tensor's tuple names."""
    if entry in (None, "None") or (entry == 1 and isinstance(entry, int) and not isinstance(entry, bool)):
        return []
    if not isinstance(entry, (int, str, tuple, list)) or isinstance(entry, bool):
        raise StrategyError(f"{tensor}: {entry!r} is neither 1, the name of a mesh dimension, nor several names")
    if isinstance(entry, int):
        fitting = [name for name, size in mesh.items() if size == entry]
        if len(fitting) == 1:
            return fitting
        sizes = ", ".join(f"{name}={size}" for name, size in mesh.items())
        problem = "several mesh dimensions have" if fitting else "no mesh dimension has"
        raise StrategyError(f"{tensor}: {problem} the size {entry} ({sizes}); give the names")
    names = [entry] if isinstance(entry, str) else list(entry)
    unknown = [name for name in names if name not in mesh]
    if unknown:
        raise StrategyError(f"{tensor}: no mesh dimension is called {unknown[0]!r}; there are {', '.join(mesh)}")
    if names != sorted(names, key=list(mesh).index):
        raise StrategyError(
            f"{tensor}: {tuple(names)} is not the order of the mesh, {', '.join(mesh)}, whose first dimension has the "
            "largest parts: name them in its order, or order the mesh so"
        )
    return names


def _match(requested: Sequence[TensorPlacements | None], layouts: Sequence[Layout]) -> bool:
    if len(requested) > len(layouts):
        return False
    return all(
        tensor is None or tensor.placements == tuple(placement.placement for placement in layout)
        for tensor, layout in zip(requested, layouts, strict=False)
    )


def named_nodes(graph: Graph, pattern: str) -> list[Node]:
    """Return the nodes that a pattern names; "*" matches any part of a path between two dots, or some of its letters.

    "layers.0-31.mlp" names the layers 0 to 31.
    "layers.*.mlp.up": in each module of that path the calls with weights, or the only call. A colon adds the operator:
    "layers.*.attn:scaled_dot_product_attention", or "layers.*.attn:*attention"; "layers.*.attn:matmul#1" is the second
    of each module's matmuls; "inputs:tokens" is an input, "weights:layers.*.up.weight" a parameter, which has each of
    its names if it is tied.
    Raises `StrategyError` if the pattern names no node, or is ambiguous.
    """
    path, _, operator = pattern.partition(":")
    if path in ("inputs", "weights"):
        nodes = [node for node in graph.nodes.values() if node.kind != CALL and _is_called(graph, node, operator)]
    elif operator:
        nodes = _operator_calls(graph, path, operator)
    else:
        nodes = _main_calls(graph, path)
    if not nodes:
        raise StrategyError(f"{pattern!r} names nothing; {_existing_names(graph, path, operator)}")
    return nodes


def _is_called(graph: Graph, node: Node, pattern: str) -> bool:
    """Tell whether a pattern names an input, parameter or buffer; a tied tensor has several names."""
    return any(path_matches(name, pattern) for name in (node.source, *graph.tied.get(node.source, ())))


def _operator_calls(graph: Graph, path: str, operator: str) -> list[Node]:
    """Return the calls of an operator in the modules of a path; with "#k" the k-th of each module, from 0."""
    name, _, number = operator.partition("#")
    nodes = [node for node in _calls(graph, path) if fnmatchcase(operator_name(node), name)]
    if not number:
        return nodes
    ordinals = ordinals_of(nodes)
    return [node for node in nodes if str(ordinals[node.name]) == number]


def ordinals_of(nodes: Sequence[Node]) -> dict[str, int]:
    """Return, by name, how many of the nodes come before each in its own module."""
    seen: dict[str, int] = {}
    ordinals = {}
    for node in nodes:
        ordinals[node.name] = seen[node.module] = seen.get(node.module, -1) + 1
    return ordinals


def operator_name(node: Node) -> str:
    """Return the bare name of a call's operator: "linear" for aten.linear.default."""
    assert node.call is not None
    return node.call.operator


def where(node: Node) -> str:
    """Return a node's name in messages: "layers.0.mlp.up linear", or "parameter layers.0.mlp.up.weight"."""
    if node.kind != CALL:
        return f"{node.kind} {node.source}"
    return f"{node.module} {operator_name(node)}".strip()


def _calls(graph: Graph, path: str) -> list[Node]:
    return [node for node in graph.of_kind(CALL) if path_matches(node.module, path)]


def path_matches(path: str, pattern: str) -> bool:
    """Tell whether a pattern names a path; "*" matches within a part between two dots, "0-31" the numbers 0 to 31."""
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(_part_matches, parts, patterns))


def _part_matches(part: str, pattern: str) -> bool:
    first, dash, last = pattern.partition("-")
    if dash and part.isdecimal() and first.isdecimal() and last.isdecimal():
        return int(first) <= int(part) <= int(last)
    return fnmatchcase(part, pattern)


def _main_calls(graph: Graph, path: str) -> list[Node]:
    """Return each module's calls with weights, or its only call that gives floating-point tensors."""
    modules: dict[str, list[Node]] = {}
    for node in _calls(graph, path):
        if not _is_cast_weight(graph, node):
            modules.setdefault(node.module, []).append(node)
    calls = []
    for module, nodes in modules.items():
        own = [node for node in nodes if any(_is_weight(graph, value) for value in node.inputs)]
        if not own and len(nodes) > 1:  # a norm without weights also counts its batches
            nodes = [node for node in nodes if any(meta.dtype.is_floating_point for meta in node.outputs)] or nodes
        own = own or (nodes if len(nodes) == 1 else [])
        if len({operator_name(node) for node in own}) != 1:
            names = ", ".join(dict.fromkeys(operator_name(node) for node in own or nodes))
            example = f"{module}:{operator_name((own or nodes)[0])}"
            raise StrategyError(f"{module!r} runs {names}: say which is meant, as in {example!r}")
        calls += own
    return calls


def _is_weight(graph: Graph, value: Value) -> bool:
    """Tell whether a tensor is a parameter, or a parameter in another dtype."""
    node = graph.nodes[value.node]
    return node.kind == PARAMETER or _is_cast_weight(graph, node)


def _is_cast_weight(graph: Graph, node: Node) -> bool:
    if node.call is None or operator_name(node) != "_to_copy":
        return False
    return graph.nodes[node.inputs[0].node].kind == PARAMETER


def _existing_names(graph: Graph, path: str, operator: str) -> str:
    """Return the part of an error message that lists names close to those of a pattern."""
    if path in ("inputs", "weights"):
        kinds = (INPUT,) if path == "inputs" else (PARAMETER, BUFFER)
        names = (" = ".join((node.source, *graph.tied.get(node.source, ()))) for node in graph.of_kind(*kinds))
        return f"there are {', '.join(names)}"
    if operator and (calls := _calls(graph, path)):
        return f"{path!r} runs {', '.join(dict.fromkeys(map(operator_name, calls)))}"
    modules = sorted({node.module for node in graph.of_kind(CALL) if node.module})
    near = [module for module in modules if path.split(".")[0].rstrip("*") in module] or modules
    return f"there are {', '.join(near[:6])}{' ...' if len(near) > 6 else ''}"


def fitting(
    node: Node, options: Sequence[Option], requested: OperatorStrategy, mesh_shape: Sequence[int]
) -> list[Option]:
    """Return the options with the requested placements; raise `StrategyError` that lists options if none has them.

    A dimension of 1, which no option shards, may be sharded along a mesh dimension of one rank: it stays whole.
    """
    metas = node.call.inputs if node.call is not None else node.outputs
    _check_dims(node, requested)
    for each in (requested, requested.whole_on_one(mesh_shape)):
        matching = [option for option in options if each.matches(option)]
        if matching:
            return matching
    shapes = ", ".join(str(list(meta.shape)) for meta in metas)
    operator = node.call.name if node.call is not None else f"{node.kind} {node.source}"
    nearest = sorted(options, key=lambda option: -requested.nearness(option))
    possible = list(dict.fromkeys(describe(option) for option in nearest))
    more = f"; and {len(possible) - 8} more" if len(possible) > 8 else ""
    raise StrategyError(
        f"{node.module or node.source}: {operator} of {shapes} cannot have {describe(requested)}; it can have "
        f"{'; '.join(possible[:8])}{more} (every piece of a dimension has to be of the same size)"
    )


def _check_dims(node: Node, requested: OperatorStrategy) -> None:
    """Raise `StrategyError` for entries whose number differs from the number of tensors or dimensions."""
    if node.call is None and requested.inputs:
        raise StrategyError(
            f"{node.source} is an input or a parameter, which reads nothing: give its layout as out_strategy "
            '(in a file: "out")'
        )
    inputs = node.call.inputs if node.call is not None else ()
    place = node.module or node.source
    for side, tensors, metas in (("input", requested.inputs, inputs), ("output", requested.outputs, node.outputs)):
        if len(tensors) > len(metas):
            raise StrategyError(f"{place}: a strategy for {len(tensors)} {side}s, of which there are {len(metas)}")
        for index, (tensor, meta) in enumerate(zip(tensors, metas, strict=False)):
            if tensor is not None and tensor.dims not in (None, len(meta.shape)):
                raise StrategyError(
                    f"{place}: {side} {index} is {list(meta.shape)}, the strategy for it has {tensor.dims} entries"
                )


def describe(option: Option | OperatorStrategy) -> str:
    """Return inputs and outputs as placements: "(S(0) R, R S(0)) -> S(0) S(1)"."""
    inputs, outputs = (", ".join(map(_text, side)) for side in (option.inputs, option.outputs))
    return f"({inputs})" + (f" -> {outputs}" if outputs else "")


def _text(layout: Any) -> str:
    if layout is None:
        return "any"
    placements = getattr(layout, "placements", layout)
    return " ".join(_short(getattr(placement, "placement", placement)) for placement in placements)


def _short(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"
