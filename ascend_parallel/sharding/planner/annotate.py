"""Reads strategies from a model (`shard`, `annotated`) or a TOML file, in the form that `propagate` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from ascend_parallel.sharding.planner.operator_strategy import StrategyError
from ascend_parallel.sharding.tracing.strategy_marks import marking
from ascend_parallel.text import shown
from ascend_parallel.tuning.cost_model.tables import PlanningError, parse_toml, read_text

Target = TypeVar("Target", bound=Callable[..., Any])
MARK = "_ascend_parallel_strategy"
KEYS = ("in", "out")


def shard(
    target: Target, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> Target:
    """Set the strategy of the operator of a module, or of a function's calls.

    target
        A module: `shard` returns the module, and `annotated` collects its strategy. Or a function that runs a single
        operator, such as ``F.scaled_dot_product_attention`` or ``torch.matmul``: `shard` returns a wrapper to call
        inside a forward. Calls of the wrapper in a traced model carry the strategy to `propagate`; a pattern that names
        the operator takes precedence.
    in_strategy, out_strategy
        An entry per tensor that the operator reads or returns, in the form of `operator_strategy.strategy`. A Linear
        reads the input [..., K], the weight [N, K] and the bias [N].

    Raises `StrategyError`; `trace` raises `TraceError` where a function's call runs several operators or none.
    """
    if in_strategy is None and out_strategy is None:
        raise StrategyError("give in_strategy, out_strategy or both")
    for entries in (in_strategy, out_strategy):
        if entries is not None and not isinstance(entries, (list, tuple)):
            raise StrategyError(f"{entries!r}: give a list with an entry for every tensor")
    if not callable(target) or isinstance(target, type):
        raise StrategyError(f"shard takes a module or a function, not {target!r}")
    if not isinstance(target, nn.Module):
        return cast(Target, marking(target, in_strategy, out_strategy))
    setattr(target, MARK, (in_strategy, out_strategy))
    return target


def annotated(model: nn.Module) -> dict[str, object]:
    """Return the strategies that `shard` left on a model's modules, by module path."""
    return {path: getattr(module, MARK) for path, module in model.named_modules() if hasattr(module, MARK)}


def read_strategies(path: str | Path) -> dict[str, object]:
    """Return the strategies of a TOML file: a table per pattern, with "in", "out" or both.

        ["layers.*.mlp.up"]
        in = [["dp", 1, 1], ["mp", 1]]

    Each array has an entry per tensor: [] for an unspecified tensor, else an entry per tensor dimension. Raises
    `StrategyError` naming the file and the pattern.
    """
    file = Path(path)
    try:
        tables = parse_toml(read_text(file, str(file)), str(file))
    except PlanningError as error:
        raise StrategyError(str(error)) from error
    return strategies_of_tables(tables, str(file))


def strategies_of_tables(tables: Any, place: str) -> dict[str, object]:
    """Return the strategies of the tables that `read_strategies` describes; errors name `place`."""
    if not isinstance(tables, Mapping):
        raise StrategyError(f"{place}: give a table for each pattern")
    return {pattern: _entry(place, pattern, table) for pattern, table in tables.items()}


def _entry(place: str, pattern: str, table: Any) -> tuple[Any, Any]:
    if isinstance(table, tuple):  # a pair as `propagate` takes it
        return table
    if not isinstance(table, dict) or not table or set(table) - set(KEYS):
        raise StrategyError(f'{place}, "{pattern}": give a table with "in", "out" or both, not {shown(table)}')
    sides = []
    for key in KEYS:
        tensors = table.get(key, [])
        if not isinstance(tensors, list) or not all(isinstance(entries, list) for entries in tensors):
            raise StrategyError(f'{place}, "{pattern}", {key}: give an array with an array for every tensor')
        # a list in a tensor's entries names several mesh dimensions
        cuts = ([tuple(entry) if isinstance(entry, list) else entry for entry in entries] for entries in tensors)
        sides.append([tuple(entries) or None for entries in cuts])
    return sides[0], sides[1]
