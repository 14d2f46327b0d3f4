"""The strategies that a plan gives its operators, each with a pattern that names the operator of all equal layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from ascend_parallel.sharding.graph import CALL, Graph, Node
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, operator_name, ordinals_of
from ascend_parallel.sharding.planner.options import signature
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.visualize.principles import Reasons, principles
from ascend_parallel.sharding.visualize.repeated_layers import layer_of, repeated

Entry = Any
Key = TypeVar("Key", bound=Hashable)
InStrategy = tuple[Entry, ...]
"""For each input a tuple of cuts per dimension, or a list of placements if the input is a partial sum."""
UNNAMED = "no principle names it: its strategy decides how its neighbours are laid out"


@dataclass(frozen=True)
class Advised:
    """An operator, or the same operator of every repeated layer.

    pattern
        The operator's name for `propagate`.
    count
        How many operators the pattern names.
    principles, reason
        The published principles that name the operator, and why, in a sentence.
    in_strategy
        The proposed strategy, from the automatic plan.
    seconds
        How much longer a step takes, computing and communicating, if this strategy alone is left out.
    """

    pattern: str
    operator: str
    count: int
    principles: tuple[int, ...]
    reason: str
    in_strategy: InStrategy
    seconds: float = 0.0

    @property
    def strategy(self) -> str:
        """The proposed strategy as text."""
        return ", ".join(map(_text, self.in_strategy))


def proposals(plan: ShardingPlan) -> list[Advised]:
    """Return every operator that computes numbers, with the plan's strategy.

    Operators of repeated layers stand together as long as their strategies are equal: under a common pattern, else by
    their number in their module, else by the numbers of the layers. Operators that no pattern names alone are left out.
    """
    reasons = principles(plan)
    computing = [node for node in plan.graph.of_kind(CALL) if _computes(node)]
    every = _grouped(plan.graph.of_kind(CALL), path_of)
    return [
        _advised(plan, pattern, members, reasons)
        for path, nodes in _alike(plan.graph, _grouped(computing, path_of))
        for pattern, members in _named(plan, path, nodes, ordinals_of(every[path_of(nodes[0])]))
    ]


def in_strategy(plan: ShardingPlan, node: Node) -> InStrategy:
    """Return the layouts of an operator's inputs as a strategy that `propagate` takes."""
    assert node.call is not None
    pairs = zip(node.call.inputs, plan.inputs[node.name], strict=True)
    return tuple(_cuts(len(meta.shape), layout, plan.mesh.dim_names) for meta, layout in pairs)


def path_of(node: Node) -> tuple[str, str]:
    """Return the key of operators that repeat: their path with "*" for numbers, and the operator."""
    return repeated(node.module), operator_name(node)


def _computes(node: Node) -> bool:
    """Tell whether an operator reads tensors and gives floating-point tensors: it has a strategy to propose."""
    return bool(node.inputs) and any(meta.dtype.is_floating_point for meta in node.outputs)


def _grouped(nodes: Iterable[Node], key: Callable[[Node], Key]) -> dict[Key, list[Node]]:
    found: dict[Key, list[Node]] = {}
    for node in nodes:
        found.setdefault(key(node), []).append(node)
    return found


def _alike(graph: Graph, groups: Mapping[tuple[str, str], list[Node]]) -> Iterator[tuple[str, list[Node]]]:
    """Yield paths and their operators: a common path for equal repeated layers, separate paths for unequal layers.

    A layer has several operators. So the numbered modules of an nn.Sequential, of an operator each, are not layers.
    """
    sizes = Counter(layer_of(node.module) for node in graph.of_kind(CALL))
    for (path, _), nodes in groups.items():
        modules = _grouped(nodes, lambda node: node.module)
        kinds = {tuple(map(signature, members)) for members in modules.values()}
        alike = len(modules) == 1 or (len(kinds) == 1 and all(sizes[layer_of(module)] > 1 for module in modules))
        yield from [(path, nodes)] if alike else modules.items()


def _named(
    plan: ShardingPlan, path: str, nodes: list[Node], ordinals: Mapping[str, int]
) -> Iterator[tuple[str, list[Node]]]:
    """Yield patterns and their operators, which have the same strategy."""
    if pattern := _pattern(plan, [path, f"{path}:{operator_name(nodes[0])}"], nodes):
        yield pattern, nodes
        return
    for number in sorted({ordinals[node.name] for node in nodes}):
        members = [node for node in nodes if ordinals[node.name] == number]
        if pattern := _pattern(plan, _names(path, members, number), members):
            yield pattern, members
            continue
        for _, same in groupby(members, key=lambda node: repr(in_strategy(plan, node))):
            run = list(same)
            where = _range([node.module for node in run])
            if pattern := _pattern(plan, _names(where, run, number), run):
                yield pattern, run


def _names(path: str, nodes: Sequence[Node], number: int) -> list[str]:
    """Return patterns for a call in each module of a path, the shortest first."""
    operator = operator_name(nodes[0])
    return [path, f"{path}:{operator}", f"{path}:{operator}#{number}"]


def _pattern(plan: ShardingPlan, patterns: Sequence[str], nodes: Sequence[Node]) -> str | None:
    """Return the first pattern that names these operators and no others; None if they differ in their strategies."""
    if len({repr(in_strategy(plan, node)) for node in nodes}) > 1:
        return None
    names = {node.name for node in nodes}
    for pattern in filter(None, patterns):
        try:
            named = {node.name for node in named_nodes(plan.graph, pattern)}
        except StrategyError:  # the path alone is ambiguous: the module has several operators
            continue
        if named == names:
            return pattern
    return None


def _range(paths: Sequence[str]) -> str:
    """Return a pattern such as "layers.2-7.mlp" for the paths from the first to the last."""
    pairs = zip(paths[0].split("."), paths[-1].split("."), strict=True)
    return ".".join(first if first == last else f"{first}-{last}" for first, last in pairs)


def _advised(plan: ShardingPlan, pattern: str, nodes: Sequence[Node], reasons: Mapping[str, Reasons]) -> Advised:
    why = {number: why for node in reversed(nodes) for number, why in reasons.get(node.name, {}).items()}
    reason = "; ".join(f"({number}) {why[number]}" for number in sorted(why)) or UNNAMED
    operator, strategy = operator_name(nodes[0]), in_strategy(plan, nodes[0])
    return Advised(pattern, operator, len(nodes), tuple(sorted(why)), reason, strategy)


def _cuts(dims: int, layout: Layout, names: Sequence[str]) -> Entry:
    if any(placement.kind == "partial" for placement in layout):
        return [placement.placement for placement in layout]
    cut: list[tuple[str, ...]] = [()] * dims
    for placement, name in zip(layout, names, strict=True):
        if placement.kind == "shard":
            cut[placement.dim] = (*cut[placement.dim], name)
    return tuple(1 if not by else by[0] if len(by) == 1 else by for by in cut)


def _text(entry: Entry) -> str:
    """Return a tensor's strategy without quotes, such as "(dp, 1, mp)"."""
    if isinstance(entry, list):
        return " ".join(map(str, entry))
    parts = ["*".join(cut) if isinstance(cut, tuple) else str(cut) for cut in entry]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
