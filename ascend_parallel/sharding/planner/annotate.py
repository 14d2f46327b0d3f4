"""Strategies written on a model, or in a TOML file: both end as patterns for `propagate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ascend_parallel.planning.tables import PlanningError, parse_toml
from ascend_parallel.sharding.planner.strategies import StrategyError

Module = TypeVar("Module", bound=nn.Module)
MARK = "_ascend_parallel_strategy"
KEYS = ("in", "out")


def shard(
    module: Module, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> Module:
    """Give a module's operator a strategy, and return the module.

    in_strategy, out_strategy: one entry per tensor that the operator reads and gives, as `strategies.strategy`
    reads it; of a Linear the input [..., K], the weight [N, K] and the bias [N].
    """
    if in_strategy is None and out_strategy is None:
        raise StrategyError("give in_strategy, out_strategy or both")
    for given in (in_strategy, out_strategy):
        if given is not None and not isinstance(given, (list, tuple)):
            raise StrategyError(f"{given!r}: give a list with an entry for every tensor")
    setattr(module, MARK, (in_strategy, out_strategy))
    return module


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
    return {pattern: _entry(file, pattern, table) for pattern, table in tables.items()}


def _entry(file: Path, pattern: str, table: Any) -> tuple[Any, Any]:
    if not isinstance(table, dict) or not table or set(table) - set(KEYS):
        raise StrategyError(f'{file}, "{pattern}": give a table with "in", "out" or both')
    found = []
    for key in KEYS:
        tensors = table.get(key, [])
        if not isinstance(tensors, list) or not all(isinstance(one, list) for one in tensors):
            raise StrategyError(f'{file}, "{pattern}", {key}: give an array with an array for every tensor')
        found.append([_cuts(one) if one else None for one in tensors])
    return found[0], found[1]


def _cuts(entries: list[Any]) -> tuple[Any, ...]:
    """Arrays of several names for one dimension become tuples."""
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
