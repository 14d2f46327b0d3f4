"""Strategies that a user gives for some operators, by name: read, and checked against what the operators can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ascend_parallel.sharding.graph import BUFFER, CALL, INPUT, PARAMETER, Graph, Node
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.options import Option


class StrategyError(ValueError):
    """A strategy that cannot be: no operator has its name, or the operator cannot run so."""


@dataclass(frozen=True)
class Wanted:
    """Placements of one tensor, one per mesh dimension, and how many dimensions it was said to have."""

    placements: tuple[Placement, ...]
    dims: int | None = None


@dataclass(frozen=True)
class OperatorStrategy:
    """What is wanted of an operator's inputs and outputs; None where nothing is said."""

    inputs: tuple[Wanted | None, ...] = ()
    outputs: tuple[Wanted | None, ...] = ()

    def nearness(self, option: Option) -> int:
        """Count the tensors that an option lays out as wanted."""
        pairs = [*zip(self.inputs, option.inputs, strict=False), *zip(self.outputs, option.outputs, strict=False)]
        return sum(one is not None and _match([one], [layout]) for one, layout in pairs)

    def matches(self, option: Option) -> bool:
        """Tell whether an option has these placements."""
        return _match(self.inputs, option.inputs) and _match(self.outputs, option.outputs)


def strategy(
    in_strategy: Sequence[Any] | None, out_strategy: Sequence[Any] | None, mesh: Mapping[str, int]
) -> OperatorStrategy:
    """Read what a user wrote for one operator.

    Each tensor is None (nothing is said), a list of placements, one per mesh dimension, or a tuple as MindSpore has
    it, one entry per tensor dimension: 1 or None (not cut), the name of a mesh dimension, several names in the order
    of the mesh, or the number of pieces where only one choice of dimensions gives it.

    mesh: sizes by name. Raises `StrategyError`.
    """
    for given in (in_strategy, out_strategy):
        if given is not None and not isinstance(given, (list, tuple)):
            raise StrategyError(f"{given!r}: give a list with an entry for every tensor")
    return OperatorStrategy(
        tuple(_placements(one, mesh) for one in in_strategy or ()),
        tuple(_placements(one, mesh) for one in out_strategy or ()),
    )


def _placements(given: Any, mesh: Mapping[str, int]) -> Wanted | None:
    if given is None:
        return None
    if isinstance(given, list):
        if len(given) != len(mesh) or not all(isinstance(one, Placement) for one in given):
            raise StrategyError(f"{given} is no placement for each of the mesh dimensions {', '.join(mesh)}")
        if any(isinstance(one, Shard) and one.dim < 0 for one in given):
            raise StrategyError(f"{given}: count the dimensions of a tensor from 0")
        return Wanted(tuple(given))
    if not isinstance(given, tuple):
        raise StrategyError(
            f"{given!r} is no tensor's strategy: give a list of placements, a tuple of cuts per dimension, or None; an "
            'operator has a list of them, as in ([None, ("mp", 1)], None)'
        )
    found: dict[str, Placement] = {}
    for dim, entry in enumerate(given):
        for name in _names(entry, mesh, given):
            if name in found:
                raise StrategyError(f"{given} uses mesh dimension {name} twice: a tensor is cut once along each")
            found[name] = Shard(dim)
    return Wanted(tuple(found.get(name, Replicate()) for name in mesh), len(given))


def _names(entry: Any, mesh: Mapping[str, int], given: tuple[Any, ...]) -> list[str]:
    """Return the mesh dimensions that an entry of a tuple names."""
    if entry is None or (entry == 1 and isinstance(entry, int) and not isinstance(entry, bool)):
        return []
    if not isinstance(entry, (int, str, tuple, list)) or isinstance(entry, bool):
        raise StrategyError(f"{given}: {entry!r} is neither 1, the name of a mesh dimension, nor several names")
    if isinstance(entry, int):
        fitting = [name for name, size in mesh.items() if size == entry]
        if len(fitting) == 1:
            return fitting
        sizes = ", ".join(f"{name}={size}" for name, size in mesh.items())
        what = "several mesh dimensions have" if fitting else "no mesh dimension has"
        raise StrategyError(f"{given}: {what} the size {entry} ({sizes}); give the names")
    names = [entry] if isinstance(entry, str) else list(entry)
    unknown = [name for name in names if name not in mesh]
    if unknown:
        raise StrategyError(f"{given}: no mesh dimension is called {unknown[0]!r}; there are {', '.join(mesh)}")
    return sorted(names, key=list(mesh).index)


def _match(wanted: Sequence[Wanted | None], layouts: Sequence[Layout]) -> bool:
    if len(wanted) > len(layouts):
        return False
    pairs = zip(wanted, layouts, strict=False)
    return all(one is None or one.placements == tuple(state.placement for state in layout) for one, layout in pairs)


def named_nodes(graph: Graph, pattern: str) -> list[Node]:
    """Return the calls that a pattern names; "*" stands for one part of a path, or for a piece of it.

    "layers.*.mlp.up": the calls with weights in modules of that path, or their only call. A colon adds the operator:
    "layers.*.attn:scaled_dot_product_attention", or "layers.*.attn:*attention"; "inputs:tokens" is an input,
    "weights:layers.*.up.weight" a parameter.
    Raises `StrategyError` if there is none, or if it cannot be told which is meant.
    """
    path, _, operator = pattern.partition(":")
    if path in ("inputs", "weights"):
        found = [node for node in graph.nodes.values() if node.kind != CALL and path_matches(node.source, operator)]
    elif operator:
        found = [node for node in _calls(graph, path) if fnmatchcase(operator_name(node), operator)]
    else:
        found = _main_calls(graph, path)
    if not found:
        raise StrategyError(f"{pattern!r} names nothing; {_what_there_is(graph, path, operator)}")
    return found


def operator_name(node: Node) -> str:
    """Return the bare name of a call's operator: "linear" of aten.linear.default."""
    assert node.call is not None
    return node.call.name.split(".")[1]


def _calls(graph: Graph, path: str) -> list[Node]:
    return [node for node in graph.nodes.values() if node.kind == CALL and path_matches(node.module, path)]


def path_matches(path: str, pattern: str) -> bool:
    """Tell whether a pattern names a path; "*" stands for one part of it, or for a piece of one."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _main_calls(graph: Graph, path: str) -> list[Node]:
    """Return, module by module, the calls with weights, or the only call."""
    modules: dict[str, list[Node]] = {}
    for node in _calls(graph, path):
        modules.setdefault(node.module, []).append(node)
    found = []
    for module, nodes in modules.items():
        own = [node for node in nodes if any(graph.nodes[value.node].kind == PARAMETER for value in node.inputs)]
        own = own or (nodes if len(nodes) == 1 else [])
        if len({operator_name(node) for node in own}) != 1:
            names = ", ".join(dict.fromkeys(operator_name(node) for node in own or nodes))
            example = f"{module}:{operator_name((own or nodes)[0])}"
            raise StrategyError(f"{module!r} runs {names}: say which is meant, as in {example!r}")
        found += own
    return found


def _what_there_is(graph: Graph, path: str, operator: str) -> str:
    if path in ("inputs", "weights"):
        kinds = (INPUT,) if path == "inputs" else (PARAMETER, BUFFER)
        return f"there are {', '.join(node.source for node in graph.nodes.values() if node.kind in kinds)}"
    if operator and (calls := _calls(graph, path)):
        return f"{path!r} runs {', '.join(dict.fromkeys(map(operator_name, calls)))}"
    modules = sorted({node.module for node in graph.nodes.values() if node.kind == CALL and node.module})
    near = [module for module in modules if path.split(".")[0].rstrip("*") in module] or modules
    return f"there are {', '.join(near[:6])}{' ...' if len(near) > 6 else ''}"


def fitting(node: Node, options: Sequence[Option], wanted: OperatorStrategy) -> list[Option]:
    """Return the options with the wanted placements, or raise `StrategyError` saying what would fit."""
    metas = node.call.inputs if node.call is not None else node.outputs
    _check_dims(node, wanted)
    found = [option for option in options if wanted.matches(option)]
    if found:
        return found
    shapes = ", ".join(str(list(meta.shape)) for meta in metas)
    what = node.call.name if node.call is not None else f"{node.kind} {node.source}"
    nearest = sorted(options, key=lambda option: -wanted.nearness(option))
    could = list(dict.fromkeys(describe(option) for option in nearest))
    more = f"; and {len(could) - 8} more" if len(could) > 8 else ""
    raise StrategyError(
        f"{node.module or node.source}: {what} of {shapes} cannot have {describe(wanted)}; it can have "
        f"{'; '.join(could[:8])}{more} (every piece of a dimension has to be of the same size)"
    )


def _check_dims(node: Node, wanted: OperatorStrategy) -> None:
    """Refuse entries for another number of tensors or of dimensions than there are."""
    if node.call is None and wanted.inputs:
        raise StrategyError(
            f"{node.source} is an input or a parameter, which reads nothing: say what it gives, as out_strategy "
            '(in a file: "out")'
        )
    inputs = node.call.inputs if node.call is not None else ()
    for what, ones, metas in (("input", wanted.inputs, inputs), ("output", wanted.outputs, node.outputs)):
        where = node.module or node.source
        if len(ones) > len(metas):
            raise StrategyError(f"{where}: a strategy for {len(ones)} {what}s, of which there are {len(metas)}")
        for index, (one, meta) in enumerate(zip(ones, metas, strict=False)):
            if one is not None and one.dims not in (None, len(meta.shape)):
                raise StrategyError(
                    f"{where}: {what} {index} is {list(meta.shape)}, the strategy for it has {one.dims} entries"
                )


def describe(option: Option | OperatorStrategy) -> str:
    """Return inputs and outputs as placements: "(S(0) R, R S(0)) -> S(0) S(1)"."""
    inputs, outputs = (", ".join(map(_text, side)) for side in (option.inputs, option.outputs))
    return f"({inputs})" + (f" -> {outputs}" if outputs else "")


def _text(layout: Any) -> str:
    if layout is None:
        return "any"
    return " ".join(_short(getattr(one, "placement", one)) for one in getattr(layout, "placements", layout))


def _short(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return f"P({placement.reduce_op})" if isinstance(placement, Partial) else "R"
