"""Minimises a sum of costs over discrete choices exactly, where each cost depends on few choices.

Eliminating a choice replaces all costs that depend on it by their minimum over its options, as a table over the other
choices of these costs (bucket elimination; Dechter 1999, doi:10.1016/S0004-3702(99)00059-4). The largest table decides
the effort. For a model's forward, a chain of layers beside a residual stream, all tables are small.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Options = npt.NDArray[np.int32]

# Limits for eliminating a choice: sums computed, and numbers kept (8 bytes each).
MOST_SUMS = 1_000_000_000
MOST_NUMBERS = 20_000_000
# Sums held at the same time.
SLICE = 200_000


class TooWideError(RuntimeError):
    """Elimination would need a table above the limits."""


@dataclass
class AssignmentProblem:
    """Choices by name and costs between them.

    sizes
        The number of options of each choice.
    own, pairs
        Costs of a choice's options, and costs ``[options of first, options of second]`` by (first, second).
    """

    sizes: dict[str, int] = field(default_factory=dict)
    own: dict[str, Costs] = field(default_factory=dict)
    pairs: dict[tuple[str, str], Costs] = field(default_factory=dict)

    def add(self, name: str, costs: Costs) -> None:
        """Add a choice with the costs of its options."""
        self.sizes[name], self.own[name] = len(costs), costs

    def add_pair(self, first: str, second: str, costs: Costs) -> None:
        """Add the costs of each pair of options, ``[options of first, options of second]``."""
        if first == second:
            self.own[first] = self.own[first] + np.diagonal(costs)
            return
        if 1 in costs.shape:  # a choice with a single option must not connect the choices beside it
            free = second if costs.shape[0] == 1 else first
            self.own[free] = self.own[free] + costs.ravel()
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
    """Costs that depend on the choices `names`, an axis for each."""

    names: tuple[str, ...]
    costs: Costs


def solve(problem: AssignmentProblem, most_numbers: int = MOST_NUMBERS, most_sums: int = MOST_SUMS) -> dict[str, int]:
    """Return the option of every choice that together have the least cost.

    Raises `TooWideError` before a table would need more than `most_numbers` numbers or `most_sums` sums.
    """
    same = _Equal()
    tables = {name: [_Table((name,), same.first(costs))] for name, costs in problem.own.items()}
    for pair, costs in problem.pairs.items():
        table = _Table(pair, same.first(costs))
        for name in pair:
            tables[name].append(table)
    sums = _Sums()
    eliminated: list[tuple[str, tuple[str, ...], Options]] = []
    for name, rest in _order(problem, most_numbers, most_sums):
        own = tables.pop(name)
        least, best = sums.least(own, (*rest, name))
        eliminated.append((name, rest, best))
        replaced = _Table(rest, least)
        for neighbour in rest:
            kept = [table for table in tables[neighbour] if not any(table is old for old in own)]
            tables[neighbour] = [*kept, replaced]
    chosen: dict[str, int] = {}
    for name, rest, best in reversed(eliminated):
        chosen[name] = int(best[tuple(chosen[neighbour] for neighbour in rest)])
    return chosen


def _order(problem: AssignmentProblem, most_numbers: int, most_sums: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the choices in the order of elimination, each with its neighbours; raises as `solve`."""
    order, found = _Order(problem), []
    while order:
        name = order.next()
        rest = order.eliminate(name)
        numbers = prod(problem.sizes[neighbour] for neighbour in rest)
        if numbers > most_numbers or numbers * problem.sizes[name] > most_sums:
            raise TooWideError(f"{name} and {len(rest)} others make a table of {numbers:,} numbers")
        found.append((name, rest))
    return found


class _Order:
    """The elimination order: the choice with the smallest table over its neighbours, earlier names first."""

    def __init__(self, problem: AssignmentProblem) -> None:
        self._sizes = problem.sizes
        self._neighbours: dict[str, set[str]] = {name: set() for name in problem.sizes}
        for first, second in problem.pairs:
            self._neighbours[first].add(second)
            self._neighbours[second].add(first)
        self._position = {name: index for index, name in enumerate(problem.sizes)}
        self._size = {name: self._table_size(name) for name in self._neighbours}
        self._buckets: dict[int, set[str]] = {}
        for name, size in self._size.items():
            self._buckets.setdefault(size, set()).add(name)

    def __bool__(self) -> bool:
        return bool(self._neighbours)

    def next(self) -> str:
        smallest = min(size for size, names in self._buckets.items() if names)
        return min(self._buckets[smallest], key=self._position.__getitem__)

    def eliminate(self, name: str) -> tuple[str, ...]:
        """Connect the neighbours of `name` with each other, and return them."""
        neighbours = self._neighbours.pop(name)
        self._buckets[self._size.pop(name)].discard(name)
        for neighbour in neighbours:
            self._neighbours[neighbour] |= neighbours
            self._neighbours[neighbour] -= {neighbour, name}
        for neighbour in neighbours:
            self._buckets[self._size[neighbour]].discard(neighbour)
            self._size[neighbour] = self._table_size(neighbour)
            self._buckets.setdefault(self._size[neighbour], set()).add(neighbour)
        return tuple(sorted(neighbours, key=self._position.__getitem__))

    def _table_size(self, name: str) -> int:
        return prod(self._sizes[neighbour] for neighbour in self._neighbours[name]) * self._sizes[name]


class _Equal:
    """Finds arrays of equal numbers: those of identical layers become one array, by which `_Sums` knows them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Costs, Costs]] = {}
        self._first: dict[tuple[tuple[int, ...], bytes], Costs] = {}

    def first(self, costs: Costs) -> Costs:
        """Return the first array that was given with these numbers."""
        if id(costs) not in self._seen:  # which keeps the array alive, so that no other one gets its id
            digest = hashlib.blake2b(costs.tobytes()).digest()
            self._seen[id(costs)] = costs, self._first.setdefault((costs.shape, digest), costs)
        return self._seen[id(costs)][1]


class _Sums:
    """Sums of tables and their minima over the last name, cached: identical layers share them."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[list[_Table], Costs, Options]] = {}

    def least(self, tables: list[_Table], names: Sequence[str]) -> tuple[Costs, Options]:
        """Return the least costs over the last of `names`, and the options that have them."""
        place = {name: index for index, name in enumerate(names)}
        # The cache keeps the tables alive, so that no other table gets the id of a cached table.
        key = tuple(sorted((id(table.costs), *(place[name] for name in table.names)) for table in tables))
        if key not in self._known:
            self._known[key] = tables, *_least(tables, names)
        return self._known[key][1:]


def _least(tables: list[_Table], names: Sequence[str]) -> tuple[Costs, Options]:
    """Minimise the sum of `tables` over the options of the last of `names`.

    A large sum is computed in slices of the first name's options, to limit memory.
    """
    sizes = {name: size for table in tables for name, size in zip(table.names, table.costs.shape, strict=True)}
    aligned, shape = _aligned(tables, names), tuple(sizes[name] for name in names)
    numbers = prod(shape)
    if len(names) == 1 or numbers <= SLICE:
        return _least_of(_sum(aligned, np.empty(shape)))
    step = max(1, SLICE * shape[0] // numbers)
    least, best = np.empty(shape[:-1]), np.empty(shape[:-1], dtype=np.int32)
    buffer = np.empty((step, *shape[1:]))
    # Tables without the first name are the same in each slice.
    same = [costs for costs in aligned if costs.shape[0] == 1]
    aligned = [costs for costs in aligned if costs.shape[0] > 1] + ([_broadcast_sum(same)] if same else [])
    for start in range(0, shape[0], step):
        part = slice(start, min(start + step, shape[0]))
        slices = [costs[part] if costs.shape[0] > 1 else costs for costs in aligned]
        least[part], best[part] = _least_of(_sum(slices, buffer[: part.stop - start]))
    return least, best


def _least_of(total: Costs) -> tuple[Costs, Options]:
    best = total.argmin(axis=-1)
    return np.take_along_axis(total, best[..., None], axis=-1)[..., 0], best.astype(np.int32)


def _aligned(tables: Iterable[_Table], names: Sequence[str]) -> list[Costs]:
    """Return the tables with an axis for each of `names`, of size 1 for names that they lack."""
    place = {name: index for index, name in enumerate(names)}
    aligned = []
    for table in tables:
        order = np.argsort([place[name] for name in table.names])
        absent = tuple(axis for axis, name in enumerate(names) if name not in table.names)
        aligned.append(np.expand_dims(table.costs.transpose(order), absent))
    return aligned


def _broadcast_sum(aligned: Sequence[Costs]) -> Costs:
    """Return the sum; small tables are added first, so that few additions are of the size of the result."""
    return functools.reduce(np.add, sorted(aligned, key=lambda costs: costs.size))


def _sum(aligned: Sequence[Costs], into: Costs) -> Costs:
    """Return the sum, written to `into`, which has the shape of all tables together."""
    *few, largest = sorted(aligned, key=lambda costs: costs.size)
    if not few:
        into[...] = largest
        return into
    result: Costs = np.add(_broadcast_sum(few), largest, out=into)
    return result
