"""Tables of texts: for a terminal, and in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# A column of sentences is folded between words down to this width.
SENTENCE = 24


class FittedTable:
    """A table for a terminal, in which no number and no name is split.

    Where it is too wide, its columns stand nearer; where that is not enough, its rows are stacked.

    Only sentences are folded, between words: long cells of left columns, those of the widest, and of those in `widest`.
    """

    def __init__(
        self,
        title: str,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Collection[int],
        widest: Mapping[str, int],
    ) -> None:
        """Take the cells as texts; `right`: the columns of numbers."""
        self._title, self._heads, self._rows = title, heads, rows
        self._table = Table(title=title, title_justify="left", box=box.SIMPLE)
        self.columns = self._table.columns
        columns = list(zip(heads, *rows, strict=True)) if rows else [(head,) for head in heads]
        longest = {
            index: max(map(len, cells))
            for index, cells in enumerate(columns)
            if index not in right and any(" " in cell for cell in cells)
        }
        sentences = {max(longest, key=longest.__getitem__, default=None)}
        sentences |= {index for index, length in longest.items() if length > 2 * SENTENCE}
        for index, (head, cells) in enumerate(zip(heads, columns, strict=True)):
            folded = index in sentences or head in widest
            word = max((len(word) for cell in cells for word in cell.split()), default=0)
            least = min(max(map(len, cells)), max(word, SENTENCE), widest.get(head, 1 << 16)) if folded else None
            self._table.add_column(
                head,
                justify="right" if index in right else "left",
                overflow="fold",
                no_wrap=not folded,
                min_width=least,
                max_width=widest.get(head),
            )
        for row in rows:
            self._table.add_row(*map(Text, row))  # Text: no markup in brackets

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its rows as lines."""
        for collapsed in (False, True):
            self._table.collapse_padding = collapsed
            if Measurement.get(console, options.update(max_width=1 << 16), self._table).minimum <= options.max_width:
                yield self._table
                return
        yield Text("\n".join([self._title, *stacked(self._heads, self._rows, options.max_width), ""]))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the widths of the table, as far as the terminal has them."""
        return Measurement.get(console, options, self._table)


def stacked(heads: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> Iterator[str]:
    """Yield each row as lines of at most `width`: its first cell, then "head cell" for all that are not empty."""
    for first, *others in rows:
        line = f"{heads[0]} {first}" if heads[0] else first
        for head, cell in zip(heads[1:], others, strict=True):
            pair = f"{head} {cell}".strip()
            if not cell:
                continue
            if len(line) + 2 + len(pair) > width:
                yield from _within(line, width)
                line = f"  {pair}"
            else:
                line += f"  {pair}"
        yield from _within(line, width)


def _within(line: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return wrapped or [""]


def terminal_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[int] = (),
    widest: Mapping[str, int] | None = None,
) -> FittedTable:
    """Return a table for a terminal; the columns of index `right` are aligned to the right.

    widest: the most columns of the terminal by head; longer cells are folded.
    """
    texts = [tuple(map(str, row)) for row in rows]
    return FittedTable(title, tuple(map(str, heads)), texts, right, widest or {})


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
