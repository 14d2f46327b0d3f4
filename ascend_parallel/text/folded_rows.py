"""Fold the rows of a table that say the same of repeated layers into a row: ``layers.0-31.mlp.up``, 32 times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

# The fewest equal rows that become a row.
FEWEST = 3


@dataclass(frozen=True)
class FoldedRow:
    """A row that stands for others.

    label
        The name of the rows, with ranges in the place of the numbers of layers: "layers.0-2,4.mlp.up".
    rows
        The places of the rows in the table, in order.
    """

    label: str
    rows: tuple[int, ...]

    @property
    def first(self) -> int:
        """The place of the first row."""
        return self.rows[0]

    @property
    def times(self) -> str:
        """The number of rows: " x32"; "" for a single row."""
        return f" x{len(self.rows)}" if len(self.rows) > 1 else ""


def fold(names: Sequence[str], kinds: Sequence[Hashable], *, full: bool = False) -> list[FoldedRow]:
    """Return the rows of a table, equal rows of repeated layers as a row, in the order of the first of each.

    names
        The dotted path that each row begins with, such as "layers.3.mlp.up".
    kinds
        What else each row shows. Rows are equal if their kinds are, and their names but for the numbers in them.
    full
        Fold nothing.
    """
    if full:
        return [FoldedRow(name, (row,)) for row, name in enumerate(names)]
    groups: dict[tuple[str, Hashable, int], list[int]] = {}
    seen: dict[tuple[str, Hashable], int] = {}
    for row, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        # The second of two equal rows of a layer goes with the second ones of the other layers.
        number = seen[name, kind] = seen.get((name, kind), -1) + 1
        groups.setdefault((_pattern(name), kind, number), []).append(row)
    found = [row for rows in groups.values() for row in _rows(names, rows)]
    return sorted(found, key=lambda each: each.first)


def _rows(names: Sequence[str], rows: list[int]) -> list[FoldedRow]:
    """Return a row for these rows if a label names them alone, else a row for each number of the first layer."""
    numbers = {row: _numbers(names[row]) for row in rows}
    columns = [sorted(set(column)) for column in zip(*numbers.values(), strict=True)]
    if len(rows) < FEWEST:
        return [FoldedRow(names[row], (row,)) for row in rows]
    if prod(map(len, columns)) == len(rows):
        return [FoldedRow(_label(names[rows[0]], columns), tuple(rows))]
    place = next(index for index, column in enumerate(columns) if len(column) > 1)
    parts: dict[int, list[int]] = {}
    for row in rows:
        parts.setdefault(numbers[row][place], []).append(row)
    return [each for part in parts.values() for each in _rows(names, part)]


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def _label(name: str, columns: Sequence[Sequence[int]]) -> str:
    texts = iter(map(_ranges, columns))
    return ".".join(next(texts) if part.isdecimal() else part for part in name.split("."))


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers such as "0-2,4"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
