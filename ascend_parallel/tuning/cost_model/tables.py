"""Read tables of numbers with their sources, and look up names with a hint for a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_parallel.text import file_text, nearest, shown, toml

ASSUMED = "assumed"
# What a file has in place of a table, in words.
KINDS = {"str": "a text", "list": "a list", "int": "a number", "float": "a number", "bool": "a flag"}
KINDS |= {"NoneType": "nothing"}


class PlanningError(ValueError):
    """A refused model, hardware or option; the message names it and the allowed values."""


@dataclass(frozen=True)
class SourcedValue:
    """A number of a table: its value, its source in words, and an optional reason."""

    value: Any
    source: str
    why: str

    @property
    def assumed(self) -> bool:
        """Whether the number has no public source."""
        return self.source == ASSUMED

    @property
    def words(self) -> str:
        """The source with the reason, if there is one."""
        return f"{self.source}: {self.why}" if self.why else self.source


def read_text(path: Path, place: str) -> str:
    """Return a user's file; raises `PlanningError` with `place` if it cannot be read."""
    try:
        return file_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningError(f"{place} cannot be read: {getattr(error, 'strerror', error)}") from error


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """Return the values of a TOML text; raises `PlanningError` with `place` if the text is not TOML."""
    try:
        return toml(text)
    except (ValueError, RecursionError) as error:  # ValueError: also too many digits; RecursionError: deep nesting
        raise PlanningError(f"{place} is no valid TOML: {error}") from error


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `over`: tables are merged, other values replaced."""
    result = dict(base)
    for key, value in over.items():
        table = isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and "value" not in value
        result[key] = merged(result[key], value) if table else value
    return result


def sourced_numbers(tables: Mapping[str, Any], sources: Mapping[str, str], place: str) -> dict[str, SourcedValue]:
    """Return every number of the tables by ``table.key``; raises `PlanningError` for a number without a source."""
    numbers = {}
    for table, entries in tables.items():
        if not isinstance(entries, Mapping):
            raise PlanningError(
                f"{place}: {table} = {entries!r} has no source; write it in a table as {{value, source}}"
            )
        for key, entry in entries.items():
            numbers[f"{table}.{key}"] = _sourced(entry, sources, f"{place}: {table}.{key}")
    return numbers


def lookup(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return ``known[name]``, ignoring case; raises `PlanningError` with all names and the nearest."""
    by_lower = {key.lower(): value for key, value in known.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    raise PlanningError(
        f"{kind} {name!r} is not known{nearest(name.lower(), by_lower)} Known: {', '.join(sorted(known))}"
    )


def require(option: str, value: object, allowed: bool, expected: str) -> None:
    """Raise `PlanningError` unless `allowed`; the message has the option, its value and the `expected` values."""
    if not allowed:
        raise PlanningError(f"{option}={shown(value)} is not allowed: give {expected}")


def need_table(place: str, value: object, expected: str) -> None:
    """Raise `PlanningError` if what a file has is no table."""
    if not isinstance(value, Mapping):
        kind = KINDS.get(type(value).__name__, type(value).__name__)
        raise PlanningError(f"{place} has {kind} in place of a table: give {expected}")


def need_keys(place: str, values: Mapping[str, Any], keys: Iterable[str], instead: str = "") -> None:
    """Raise `PlanningError` with the keys that have no value; instead: what else would give them, in words."""
    missing = [key for key in keys if values.get(key) is None]
    if missing:
        raise PlanningError(f"{place} has no {', '.join(missing)}{instead}")


def _sourced(entry: Any, sources: Mapping[str, str], place: str) -> SourcedValue:
    if not isinstance(entry, Mapping) or "value" not in entry or "source" not in entry:
        raise PlanningError(f"{place} = {entry!r} needs a value and a source, such as {{ value = 24, source = 'ini' }}")
    source, why = entry["source"], entry.get("why", "")
    if source == ASSUMED and not why:
        raise PlanningError(f"{place} is assumed without saying why")
    if source != ASSUMED and source not in sources:
        raise PlanningError(f"{place} names the source {source!r}, which [sources] does not have")
    return SourcedValue(entry["value"], source if source == ASSUMED else sources[source], why)
