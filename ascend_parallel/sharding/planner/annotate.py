"""Strategies written on a model, or in a TOML file: both end as patterns for `propagate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from torch import nn

from ascend_parallel.sharding.planner.operator_strategy import StrategyError
from ascend_parallel.sharding.tracing.strategy_marks import marking
from ascend_parallel.tuning.cost_model.tables import PlanningError, parse_toml

Module = TypeVar("Module", bound=nn.Module)
Given = ParamSpec("Given")
Made = TypeVar("Made")
MARK = "_ascend_parallel_strategy"
KEYS = ("in", "out")


@overload
def shard(
    target: Module, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> Module: ...
@overload
def shard(
    target: Callable[Given, Made],
    in_strategy: Sequence[Any] | None = None,
    out_strategy: Sequence[Any] | None = None,
) -> Callable[Given, Made]: ...
def shard(target: Any, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None) -> Any:
    """Give the operator of a module, or of a function's calls, a strategy.

    target
        A module, which is returned, and whose strategy `annotated` collects. Or a function that runs one operator, such
        as ``F.scaled_dot_product_attention`` or ``torch.matmul``: returned is a function that computes the same, to be
        called inside a forward. Its calls in a traced model carry the strategy to `propagate`, where a pattern that
        names the operator goes before it.
    in_strategy, out_strategy
        One entry per tensor that the operator reads and gives, as `strategies.strategy` reads it; of a Linear the
        input [..., K], the weight [N, K] and the bias [N].

    Raises `StrategyError`; `trace` raises `TraceError` where a function's call runs several operators or none.
    """
    if in_strategy is None and out_strategy is None:
        raise StrategyError("give in_strategy, out_strategy or both")
    for given in (in_strategy, out_strategy):
        if given is not None and not isinstance(given, (list, tuple)):
            raise StrategyError(f"{given!r}: give a list with an entry for every tensor")
    if not callable(target) or isinstance(target, type):
        raise StrategyError(f"shard takes a module or a function, not {target!r}")
    if not isinstance(target, nn.Module):
        return marking(target, in_strategy, out_strategy)
    setattr(target, MARK, (in_strategy, out_strategy))
    return target


def annotated(model: nn.Module) -> dict[str, object]:
    """Return the strategies that `shard` left on a model's modules, by their path."""
    return {path: getattr(module, MARK) for path, module in model.named_modules() if hasattr(module, MARK)}


def read_strategies(path: str | Path) -> dict[str, object]:
    """Read strategies from a TOML file: a table per pattern, with "in", "out" or both.

        ["layers.*.mlp.up"]
        in = [["dp", 1, 1], ["mp", 1]]

    An entry per tensor: [] where nothing is said, else an entry per tensor dimension. Raises `StrategyError` naming
    the file and the pattern.
    """
    file = Path(path)
    try:
        tables = parse_toml(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise StrategyError(f"{file} cannot be read: {error.strerror}") from error
    except (PlanningError, UnicodeDecodeError) as error:
        raise StrategyError(str(error)) from error
    return strategies_of_tables(tables, str(file))


def strategies_of_tables(tables: Any, place: str) -> dict[str, object]:
    """Return the strategies of such tables; `place` is named in errors."""
    if not isinstance(tables, Mapping):
        raise StrategyError(f"{place}: give a table for each pattern")
    return {pattern: _entry(place, pattern, table) for pattern, table in tables.items()}


def _entry(place: str, pattern: str, table: Any) -> tuple[Any, Any]:
    if isinstance(table, tuple):  # a pair as `propagate` takes it
        return table
    if not isinstance(table, dict) or not table or set(table) - set(KEYS):
        raise StrategyError(f'{place}, "{pattern}": give a table with "in", "out" or both')
    found = []
    for key in KEYS:
        tensors = table.get(key, [])
        if not isinstance(tensors, list) or not all(isinstance(one, list) for one in tensors):
            raise StrategyError(f'{place}, "{pattern}", {key}: give an array with an array for every tensor')
        found.append([_cuts(one) if one else None for one in tensors])
    return found[0], found[1]


def _cuts(entries: list[Any]) -> tuple[Any, ...]:
    """Arrays of several names for one dimension become tuples."""
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
