"""Tables of texts: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def terminal_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[int] = (),
    widest: Mapping[str, int] | None = None,
) -> Table:
    """Return a table for a terminal; the columns of index `right` are aligned to the right.

    widest: the most columns of the terminal by head; longer cells are folded.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, head in enumerate(heads):
        width = (widest or {}).get(head)
        table.add_column(head, justify="right" if index in right else "left", overflow="fold", max_width=width)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # Text: no markup in brackets
    return table


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
