"""What is to be computed again in backward: said in patterns, or by marks on a model's modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ascend_parallel.sharding.graph import CALL, Graph, Node
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, path_matches
from ascend_parallel.sharding.rules import draws

COLLECTIVES = ("keep", "again")
MARK = "_ascend_parallel_recompute"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What is computed again in backward, and not kept from forward to backward.

    modules
        Modules by path pattern, such as "layers.*": all that runs inside of them, and inside of theirs; "" is the
        model. With a colon single operators, as in strategies: "layers.*:gelu".
    keep
        Exceptions, in the syntax of strategies ("layers.*.mlp.down", "layers.*:scaled_dot_product_attention"): the
        results of these operators are kept.
    collectives
        "keep": results of the forward's collectives, and of the matmuls that overlap with them, are kept, so that
        none runs twice. "again": they run again, for less memory.
    """

    modules: Sequence[str] = ()
    keep: Sequence[str] = ()
    collectives: str = "keep"

    def __post_init__(self) -> None:
        """Check each option."""
        for name in ("modules", "keep"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) for one in given):
                raise ValueError(f"recompute.{name}={given!r}: give a list of patterns, such as ['layers.*']")
            object.__setattr__(self, name, tuple(given))
        if self.collectives not in COLLECTIVES:
            raise ValueError(f"recompute.collectives={self.collectives!r}: give one of {', '.join(COLLECTIVES)}")
        if self.keep and not self.modules:
            raise ValueError(f"recompute.keep={list(self.keep)} without recompute.modules: there is nothing to except")

    @classmethod
    def of(cls, model: torch.nn.Module) -> Recompute:
        """Collect what `recompute` left on a model's modules. Raises `ValueError` if they differ in collectives."""
        found = {path: getattr(module, MARK) for path, module in model.named_modules() if hasattr(module, MARK)}
        ways = {mark.collectives: path for path, mark in found.items()}
        if len(ways) > 1:
            told = " and ".join(f"collectives={way!r} on {path!r}" for way, path in ways.items())
            raise ValueError(f"modules are marked with recompute({told}): give one for the whole model")
        marks = [mark.below(path) for path, mark in found.items()]
        return cls(
            modules=[one for mark in marks for one in mark.modules],
            keep=[one for mark in marks for one in mark.keep],
            collectives=next(iter(ways), "keep"),
        )

    def below(self, path: str) -> Recompute:
        """Return the same with patterns that are relative to the module of that path."""
        modules, keep = ([_joined(path, one) for one in patterns] for patterns in (self.modules, self.keep))
        return Recompute(modules=modules, keep=keep, collectives=self.collectives)


def check_recompute(graph: Graph, recompute: Recompute) -> None:
    """Raise `StrategyError` for a pattern that names nothing, and for an exception that cannot be one."""
    again: set[str] = set()
    for pattern in recompute.modules:
        found = {node.name for node in named_nodes(graph, pattern)} if ":" in pattern else set(nodes_of(graph, pattern))
        if not found:
            paths = sorted({path for node in calls(graph) for path in prefixes(node.module)} - {""})
            near = [path for path in paths if path.split(".")[0] == pattern.split(".")[0]] or paths
            raise StrategyError(f"recompute.modules: {pattern!r} names no module; there are {', '.join(near[:6])}")
        again |= found
    for pattern in recompute.keep:
        for node in named_nodes(graph, pattern):
            if node.call is None or node.name not in again:
                raise StrategyError(f"recompute.keep: {pattern!r} names {node.name}, which does not run again")
            if draws(node.call):
                raise StrategyError(
                    f"recompute.keep: {pattern!r} names {node.call.name}, which draws random numbers, and can only run "
                    "again (with the same ones)"
                )


def calls(graph: Graph) -> Iterable[Node]:
    """Return the operators' nodes, in order."""
    return (node for node in graph.nodes.values() if node.kind == CALL)


def prefixes(path: str) -> list[str]:
    """Return a module's path and those of the modules around it, the outermost, "", first."""
    return ["", *accumulate(path.split("."), lambda before, part: f"{before}.{part}")] if path else [""]


def nodes_of(graph: Graph, pattern: str) -> Mapping[str, Node]:
    """Return the calls of a pattern of `Recompute.modules`."""
    if ":" in pattern:
        return {node.name: node for node in found_nodes(graph, pattern) if node.kind == CALL}
    found = (node for node in calls(graph) if any(path_matches(path, pattern) for path in prefixes(node.module)))
    return {node.name: node for node in found}


def found_nodes(graph: Graph, pattern: str) -> list[Node]:
    """Return the nodes of a pattern of strategies; none where it names none."""
    try:
        return named_nodes(graph, pattern)
    except StrategyError:
        return []


def _joined(path: str, pattern: str) -> str:
    """Return a pattern that is relative to a module as one of the model."""
    return pattern if not path else path + pattern if not pattern or pattern.startswith(":") else f"{path}.{pattern}"
