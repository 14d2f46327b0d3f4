"""The result of a search as text, as plain values, and as the TOML of a strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ascend_parallel.text import size_of
from ascend_parallel.text.tables import stacked
from ascend_parallel.training.degrees.evaluation import StepBreakdown
from ascend_parallel.training.degrees.search import Candidate, SearchResult

# The first line of a written file, by which it may be written again.
HEADER = "# Written by ascend-parallel plan-training"
HEADS = (
    "",
    "dp",
    "ep",
    "cp",
    "tp",
    "pp",
    "micro-batches",
    "schedule",
    "recompute",
    "ZeRO",
    "step s",
    "memory",
    "bubbles",
    "why",
)
WORDS = {
    "compute": "computation",
    "tensor": "collectives of tp",
    "recompute": "recomputation",
    "bubble": "bubbles",
    "replicas": "collectives of dp",
    "optimizer": "the optimizer",
}
# Schedules that `ascend-parallel predict` knows: it says the same bytes within 3 % of these.
PREDICTED = ("gpipe", "1f1b", "interleaved_1f1b")
# Of a step's time: smaller differences are not named.
NAMED = 0.001


def text(found: SearchResult, width: int | None = None) -> str:
    """Return the ten best with their reasons, the parts of the best, and what does not fit, in lines.

    width: of the terminal; where the table is wider, its rows are stacked. None: no limit.
    """
    lines = [
        f"{found.ranks} ranks of {found.hardware}, {size_of(found.limit)} each, a batch of {found.rows} rows: "
        f"{found.considered} choices, {found.timed} timed",
        "",
        *_table(_rows(found), width),
        "",
        f"best: {found.best[0].seconds:.4g} s a step, {found.throughput(found.best[0])}",
        "best, on the rank with the most work: "
        + ", ".join(f"{WORDS[name]} {seconds:.4g} s" for name, seconds in vars(found.best[0].breakdown).items()),
        "best, on the rank that holds the most: "
        + ", ".join(f"{name} {size_of(size)}" for name, size in vars(found.best[0].memory).items()),
    ]
    if found.best[0].degrees.pp > 1 and found.best[0].degrees.schedule not in PREDICTED:
        lines.append(
            f"predict knows no {found.best[0].degrees.schedule}: its bytes and seconds are those of 1F1B, with other "
            "micro-batches in flight and other receive buffers"
        )
    if found.too_large is not None:
        lines.append(_outside(found.too_large, found))
    return "\n".join(lines)


def as_dict(found: SearchResult) -> dict[str, Any]:
    """Return the result as plain values, for JSON: seconds and bytes."""
    return {
        "ranks": found.ranks,
        "rows": found.rows,
        "memory": found.limit,
        "hardware": found.hardware,
        "considered": found.considered,
        "timed": found.timed,
        "best": [_values(each, found) for each in found.best],
        "too_large": None if found.too_large is None else _values(found.too_large, found),
    }


def toml_of(tables: Mapping[str, Any], found: SearchResult, candidate: Candidate) -> str:
    """Return the TOML text of a strategy's tables, with the prediction as a comment."""
    comment = (
        f"{HEADER}: {found.ranks} ranks of {found.hardware}, {size_of(found.limit)} each, {found.rows} rows\n"
        f"# {candidate}\n"
        f"# predicted: {candidate.seconds:.4g} s a step, {size_of(candidate.memory.total)} a rank\n"
    )
    plain = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    parts = [_section(name, table) for name, table in tables.items() if isinstance(table, Mapping)]
    return "\n".join([comment, *plain, *parts]) + "\n"


def why(candidate: Candidate, best: Candidate) -> str:
    """Return why a candidate is slower than the best: the parts that take longer, the largest first."""
    if candidate is best:
        return "the fastest"
    slower = candidate.seconds / best.seconds - 1
    longer = _longer(candidate.breakdown, best.breakdown)
    if not longer:
        return "as fast; " + (
            "needs more memory" if candidate.memory.total > best.memory.total else "listed after the first"
        )
    parts = ", ".join(f"{WORDS[name]} +{100 * more / best.seconds:.1f} %" for name, more in longer[:2])
    return f"+{100 * slower:.1f} %: {parts}"


def _longer(breakdown: StepBreakdown, than: StepBreakdown) -> list[tuple[str, float]]:
    more = {name: seconds - getattr(than, name) for name, seconds in vars(breakdown).items()}
    named = [(name, seconds) for name, seconds in more.items() if seconds > NAMED * than.total]
    return sorted(named, key=lambda pair: -pair[1])


def _rows(found: SearchResult) -> list[tuple[str, ...]]:
    """Return the rows of the table; columns of ranks that share experts or sequences only if some do."""
    rows = [HEADS, *(_row(place, each, found) for place, each in enumerate(found.best, 1))]
    ones = {name for name in ("ep", "cp") if all(getattr(each.degrees, name) == 1 for each in found.best)}
    shown = [place for place, name in enumerate(HEADS) if name not in ones]
    return [tuple(row[place] for place in shown) for row in rows]


def _row(place: int, candidate: Candidate, found: SearchResult) -> tuple[str, ...]:
    degrees = candidate.degrees
    return (
        str(place),
        str(degrees.dp),
        str(degrees.ep),
        f"{degrees.cp} ({degrees.exchange_words})" if degrees.exchange_words else str(degrees.cp),
        candidate.tensor,
        str(degrees.pp),
        f"{degrees.micro_batches} of {degrees.rows}",
        degrees.schedule_words if degrees.pp > 1 else "-",
        degrees.recompute_words,
        str(degrees.zero_stage),
        f"{candidate.seconds:.4g}",
        size_of(candidate.memory.total),
        f"{round(100 * candidate.breakdown.bubble / candidate.seconds, 1) + 0.0} %",
        why(candidate, found.best[0]),
    )


def _outside(candidate: Candidate, found: SearchResult) -> str:
    """Say which of those that do not fit looks the fastest, and what it would need."""
    name, size = max(vars(candidate.memory).items(), key=lambda pair: pair[1])
    slower = candidate.seconds / found.best[0].seconds - 1
    return (
        f"does not fit: {candidate} needs {size_of(candidate.memory.total)}, {size_of(size)} of it {name}, "
        f"for a step of {candidate.seconds:.4g} s ({100 * slower:+.1f} %)"
    )


def _values(candidate: Candidate, found: SearchResult) -> dict[str, Any]:
    return {
        "degrees": vars(candidate.degrees),
        "gathers_weights": candidate.gathers_weights,
        "whole_weights": candidate.whole_weights,
        **found.throughput(candidate).as_dict(),
        "parts": vars(candidate.breakdown),
        "bubble": candidate.breakdown.bubble / candidate.seconds,
        "memory": vars(candidate.memory) | {"total": candidate.memory.total},
        "why": why(candidate, found.best[0]),
        "strategy": found.tables(candidate),
    }


def _section(name: str, table: Mapping[str, Any]) -> str:
    """Return a table of texts, numbers, flags and lists of texts; JSON writes these as TOML does."""
    return "\n".join(["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())])


def _table(rows: list[tuple[str, ...]], width: int | None) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    if width is None or max(map(len, lines)) <= width:
        yield from lines
        return
    heads, *others = rows
    yield from stacked(heads, others, width)
