"""Tables of numbers, each with its source, and names that are looked up with help for a misspelt one."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ascend_parallel.text import shown

ASSUMED = "assumed"


class PlanningError(ValueError):
    """A model, hardware or option that is not allowed; the message names it and what is allowed."""


@dataclass(frozen=True)
class Sourced:
    """A number of a table as read: its value, the words of its source, and why, where that says more."""

    value: Any
    source: str
    why: str

    @property
    def assumed(self) -> bool:
        """Whether no public source was found."""
        return self.source == ASSUMED


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """Read TOML; raises `PlanningError` naming `place` if it is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads, and deep nesting
        raise PlanningError(f"{place} is no valid TOML: {error}") from error
    return values


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`: a table on a table, a number or a text in place of another."""
    result = dict(base)
    for key, value in over.items():
        table = isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and "value" not in value
        result[key] = merged(result[key], value) if table else value
    return result


def sourced_numbers(tables: Mapping[str, Any], sources: Mapping[str, str], place: str) -> dict[str, Sourced]:
    """Return every number of the tables as ``table.key``; raises `PlanningError` for one without a source."""
    found = {}
    for table, entries in tables.items():
        if not isinstance(entries, Mapping):
            raise PlanningError(
                f"{place}: {table} = {entries!r} has no source; write it in a table as {{value, source}}"
            )
        for key, entry in entries.items():
            found[f"{table}.{key}"] = _sourced(entry, sources, f"{place}: {table}.{key}")
    return found


def lookup(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return ``known[name]``, whatever the case; else raise `PlanningError` with all names and the nearest."""
    by_lower = {key.lower(): value for key, value in known.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    raise PlanningError(f"{kind} {name!r} is not known{nearest(name, by_lower)} Known: {', '.join(sorted(known))}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` ; did you mean ...?`` or a full stop."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def require(option: str, value: object, allowed: bool, what: str) -> None:
    """Raise `PlanningError` unless `allowed`, naming the option, its value and what is allowed."""
    if not allowed:
        raise PlanningError(f"{option}={shown(value)} is not allowed: give {what}")


def _sourced(entry: Any, sources: Mapping[str, str], place: str) -> Sourced:
    if not isinstance(entry, Mapping) or "value" not in entry or "source" not in entry:
        raise PlanningError(f"{place} = {entry!r} needs a value and a source, such as {{ value = 24, source = 'ini' }}")
    source, why = entry["source"], entry.get("why", "")
    if source == ASSUMED and not why:
        raise PlanningError(f"{place} is assumed without saying why")
    if source != ASSUMED and source not in sources:
        raise PlanningError(f"{place} names the source {source!r}, which [sources] does not have")
    return Sourced(entry["value"], source if source == ASSUMED else sources[source], why)
