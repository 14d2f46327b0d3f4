"""What backward recomputes: given by patterns, or by marks on a model's modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ascend_parallel.sharding.graph import CALL, Graph, Node
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, path_matches
from ascend_parallel.sharding.rules import draws

COLLECTIVES = ("keep", "recompute")
MARK = "_ascend_parallel_recompute"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What backward recomputes instead of keeping it from forward.

    modules
        Modules by path pattern, such as "layers.*", with all their submodules; "" is the whole model. With a colon
        single operators, as in strategies: "layers.*:gelu".
    keep
        Exceptions, in the syntax of strategies ("layers.*.mlp.down", "layers.*:scaled_dot_product_attention"): the
        results of these operators are kept.
    collectives
        "keep": keep the results of the forward's collectives and of the matmuls that overlap with them, so that no
        collective runs twice. "recompute": run them again, for less memory.
    """

    modules: Sequence[str] = ()
    keep: Sequence[str] = ()
    collectives: str = "keep"

    def __post_init__(self) -> None:
        """Check each option."""
        for name in ("modules", "keep"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"recompute.{name}={patterns!r}: give a list of patterns, such as ['layers.*']")
            object.__setattr__(self, name, tuple(patterns))
        if self.collectives not in COLLECTIVES:
            raise ValueError(f"recompute.collectives={self.collectives!r}: give one of {', '.join(COLLECTIVES)}")
        if self.keep and not self.modules:
            raise ValueError(f"recompute.keep={list(self.keep)} without recompute.modules: give modules too")

    @classmethod
    def of(cls, model: torch.nn.Module) -> Recompute:
        """Collect the marks of `recompute` on a model's modules. Raises `ValueError` if they differ in collectives."""
        by_path = {path: getattr(module, MARK) for path, module in model.named_modules() if hasattr(module, MARK)}
        options = {mark.collectives: path for path, mark in by_path.items()}
        if len(options) > 1:
            marked = " and ".join(f"collectives={option!r} on {path!r}" for option, path in options.items())
            raise ValueError(f"modules are marked with recompute({marked}): give the same option on all modules")
        marks = [mark.below(path) for path, mark in by_path.items()]
        return cls(
            modules=[pattern for mark in marks for pattern in mark.modules],
            keep=[pattern for mark in marks for pattern in mark.keep],
            collectives=next(iter(options), "keep"),
        )

    def below(self, path: str) -> Recompute:
        """Return the same options with all patterns relative to the module at `path`."""
        modules, keep = ([_joined(path, pattern) for pattern in patterns] for patterns in (self.modules, self.keep))
        return Recompute(modules=modules, keep=keep, collectives=self.collectives)


def check_recompute(graph: Graph, recompute: Recompute) -> None:
    """Raise `StrategyError` for a pattern that names nothing, and for an operator in `keep` that cannot be kept."""
    recomputed: set[str] = set()
    around = {node.name: prefixes(node.module) for node in graph.of_kind(CALL)}
    for pattern in recompute.modules:
        found = {name for name, paths in around.items() if any(path_matches(path, pattern) for path in paths)}
        if ":" in pattern:
            found = {node.name for node in named_nodes(graph, pattern)}
        if not found:
            paths = sorted({path for paths in around.values() for path in paths} - {""})
            near = [path for path in paths if path.split(".")[0] == pattern.split(".")[0]] or paths
            raise StrategyError(f"recompute.modules: {pattern!r} names no module; there are {', '.join(near[:6])}")
        recomputed |= found
    for pattern in recompute.keep:
        for node in named_nodes(graph, pattern):
            if node.call is None or node.name not in recomputed:
                raise StrategyError(f"recompute.keep: {pattern!r} names {node.name}, which is not recomputed")
            if draws(node.call):
                raise StrategyError(
                    f"recompute.keep: {pattern!r} names {node.call.name}, which draws random numbers and cannot be "
                    "kept: leave it out, recompute draws the same numbers"
                )


def prefixes(path: str) -> list[str]:
    """Return the paths of the modules around a module, from the outermost, "", to its own."""
    return ["", *accumulate(path.split("."), lambda before, part: f"{before}.{part}")] if path else [""]


def found_nodes(graph: Graph, pattern: str) -> list[Node]:
    """Return the nodes that a pattern of strategies names; an empty list if there are none."""
    try:
        return named_nodes(graph, pattern)
    except StrategyError:
        return []


def _joined(path: str, pattern: str) -> str:
    """Turn a pattern relative to a module into a pattern relative to the model."""
    return pattern if not path else path + pattern if not pattern or pattern.startswith(":") else f"{path}.{pattern}"
