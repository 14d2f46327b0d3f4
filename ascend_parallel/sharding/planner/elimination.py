"""The least sum of costs over discrete choices, each cost depending on few of them: exact, choice after choice.

Eliminating a choice replaces all costs that depend on it by their minimum over it, as a table over the choices they
also depend on (bucket elimination; Dechter 1999, doi:10.1016/S0004-3702(99)00059-4). Its price is the largest table,
which is small for a model's forward: a chain of layers with a residual stream beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Options = npt.NDArray[np.int32]

# Sums looked at for one choice, and numbers kept of them: 8 bytes each.
MOST_SUMS = 1_000_000_000
MOST_NUMBERS = 20_000_000
# Sums held at the same time.
SLICE = 200_000


class TooWideError(RuntimeError):
    """The choices depend on each other so much that the tables would not fit."""


@dataclass
class AssignmentProblem:
    """Choices by name and costs between them.

    sizes
        How many options each choice has.
    own, pairs
        Costs of one choice's options, and of two choices' options by (first, second).
    """

    sizes: dict[str, int] = field(default_factory=dict)
    own: dict[str, Costs] = field(default_factory=dict)
    pairs: dict[tuple[str, str], Costs] = field(default_factory=dict)

    def add(self, name: str, costs: Costs) -> None:
        """Add a choice whose options cost so much by themselves."""
        self.sizes[name], self.own[name] = len(costs), costs

    def add_pair(self, first: str, second: str, costs: Costs) -> None:
        """Add what each pair of options costs, ``[options of first, options of second]``."""
        if first == second:
            self.own[first] = self.own[first] + np.diagonal(costs)
            return
        if 1 in costs.shape:  # no choice on one side: it must not tie together all that depend on it
            one = second if costs.shape[0] == 1 else first
            self.own[one] = self.own[one] + costs.ravel()
            return
        if (second, first) in self.pairs:
            first, second, costs = second, first, costs.T
        known = self.pairs.get((first, second))
        self.pairs[first, second] = costs if known is None else known + costs

    def cost(self, chosen: Mapping[str, int]) -> float:
        """Return the sum of all costs."""
        own = sum(costs[chosen[name]] for name, costs in self.own.items())
        return float(own + sum(costs[chosen[a], chosen[b]] for (a, b), costs in self.pairs.items()))


@dataclass
class _Table:
    """Costs that depend on `names`, one axis for each."""

    names: tuple[str, ...]
    costs: Costs


def solve(problem: AssignmentProblem, most_numbers: int = MOST_NUMBERS, most_sums: int = MOST_SUMS) -> dict[str, int]:
    """Return the option of every choice in a least sum.

    Raises `TooWideError` before a table of more than `most_numbers` numbers is made, out of more than `most_sums` sums.
    """
    tables: dict[str, list[_Table]] = {name: [_Table((name,), costs)] for name, costs in problem.own.items()}
    for pair, costs in problem.pairs.items():
        table = _Table(pair, costs)
        for name in pair:
            tables[name].append(table)
    order, sums = _Order(problem), _Sums()
    eliminated: list[tuple[str, tuple[str, ...], Options]] = []
    while order:
        name = order.next()
        rest = order.eliminate(name)
        numbers = prod(problem.sizes[one] for one in rest)
        if numbers > most_numbers or numbers * problem.sizes[name] > most_sums:
            raise TooWideError(f"{name} and {len(rest)} others make a table of {numbers:,} numbers")
        own = tables.pop(name)
        least, best = sums.least(own, (*rest, name))
        eliminated.append((name, rest, best))
        replaced = _Table(rest, least)
        for one in rest:
            tables[one] = [table for table in tables[one] if not any(table is old for old in own)] + [replaced]
    chosen: dict[str, int] = {}
    for name, rest, best in reversed(eliminated):
        chosen[name] = int(best[tuple(chosen[one] for one in rest)])
    return chosen


class _Order:
    """Which choice goes next: one whose neighbours' table is smallest, earlier names first."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self._sizes = problem.sizes
        self._near: dict[str, set[str]] = {name: set() for name in problem.sizes}
        for first, second in problem.pairs:
            self._near[first].add(second)
            self._near[second].add(first)
        self._rank = {name: index for index, name in enumerate(problem.sizes)}
        self._price = {name: self._table(name) for name in self._near}
        self._buckets: dict[int, set[str]] = {}
        for name, price in self._price.items():
            self._buckets.setdefault(price, set()).add(name)

    def __bool__(self) -> bool:
        return bool(self._near)

    def next(self) -> str:
        """Return the cheapest choice to eliminate."""
        cheapest = min(price for price, names in self._buckets.items() if names)
        return min(self._buckets[cheapest], key=self._rank.__getitem__)

    def eliminate(self, name: str) -> tuple[str, ...]:
        """Join the neighbours of `name` to each other and return them."""
        near = self._near.pop(name)
        self._buckets[self._price.pop(name)].discard(name)
        for one in near:
            self._near[one] |= near
            self._near[one] -= {one, name}
        for one in near:
            self._buckets[self._price[one]].discard(one)
            self._price[one] = self._table(one)
            self._buckets.setdefault(self._price[one], set()).add(one)
        return tuple(sorted(near, key=self._rank.__getitem__))

    def _table(self, name: str) -> int:
        return prod(self._sizes[one] for one in self._near[name]) * self._sizes[name]


class _Sums:
    """Sums of tables and their minima over the last name; those of layers that are alike are made once."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[list[_Table], Costs, Options]] = {}

    def least(self, tables: list[_Table], names: Sequence[str]) -> tuple[Costs, Options]:
        """Return the least cost over the last of `names`, and where it is."""
        place = {name: index for index, name in enumerate(names)}
        # The tables are kept with the result, so that their identity cannot pass to others.
        key = tuple(sorted((id(table.costs), *(place[name] for name in table.names)) for table in tables))
        if key not in self._known:
            self._known[key] = tables, *_least(tables, names)
        return self._known[key][1:]


def _least(tables: list[_Table], names: Sequence[str]) -> tuple[Costs, Options]:
    """Minimise the sum of tables over the last name, a slice of the first one's options at a time."""
    sizes = {name: size for table in tables for name, size in zip(table.names, table.costs.shape, strict=True)}
    numbers, first = prod(sizes.values()), names[0]
    if len(names) == 1 or numbers <= SLICE:
        return _least_of(_sum(tables, names))
    step = max(1, SLICE * sizes[first] // numbers)
    pieces = []
    for start in range(0, sizes[first], step):
        pieces.append(_least_of(_sum([_part(table, first, slice(start, start + step)) for table in tables], names)))
    least, best = zip(*pieces, strict=True)
    return np.concatenate(least), np.concatenate(best)


def _least_of(total: Costs) -> tuple[Costs, Options]:
    best = total.argmin(axis=-1)
    return np.take_along_axis(total, best[..., None], axis=-1)[..., 0], best.astype(np.int32)


def _part(table: _Table, name: str, options: slice) -> _Table:
    """Return the table for some options of one name."""
    if name not in table.names:
        return table
    index = [slice(None)] * len(table.names)
    index[table.names.index(name)] = options
    return _Table(table.names, table.costs[tuple(index)])


def _sum(tables: Iterable[_Table], names: Sequence[str]) -> Costs:
    """Add tables over the axes `names`."""
    place = {name: index for index, name in enumerate(names)}
    total: Costs | None = None
    for table in tables:
        axes = sorted(range(len(table.names)), key=lambda axis: place[table.names[axis]])
        shape = [1] * len(names)
        for axis, one in enumerate(table.names):
            shape[place[one]] = table.costs.shape[axis]
        aligned = table.costs.transpose(axes).reshape(shape)
        total = aligned if total is None else total + aligned
    assert total is not None
    return total
