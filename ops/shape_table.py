"""Chunks by matmul shape (`customized_coc`), and the checks that refuse bad settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ascend_parallel.text import shown

MAX_CHUNKS = 64
Shape = tuple[int, int, int]
# A number of chunks, or the rows of each chunk.
Cut = int | tuple[int, ...]


class SettingsError(ValueError):
    """A setting that is not allowed; the message names the option, its value and what is allowed."""


class ShapeTable(Mapping[Shape, Cut]):
    """Chunk counts, or the rows of each chunk, by matmul shape ``(m, k, n)``: an immutable, hashable mapping."""

    def __init__(self, entries: Mapping[Any, Any] | None = None) -> None:
        """Check every entry; keys are triples or the published strings such as ``"[16384, 5120, 1920]"``."""
        checked = {_shape_key(key): _cut(f"customized_coc[{shown(key)}]", value) for key, value in _items(entries)}
        self._entries = tuple(sorted(checked.items()))

    def __getitem__(self, key: Shape) -> Cut:
        """Return the chunk count of one shape, or the rows of its chunks."""
        return dict(self._entries)[key]

    def __iter__(self) -> Iterator[Shape]:
        """Iterate over the shapes in sorted order."""
        return (key for key, _ in self._entries)

    def __len__(self) -> int:
        """Return the number of shapes."""
        return len(self._entries)

    def __hash__(self) -> int:
        """Hash the entries, so that choices can be cached."""
        return hash(self._entries)

    def __eq__(self, other: object) -> bool:
        """Compare with any mapping."""
        return isinstance(other, Mapping) and dict(self._entries) == dict(other)

    def __repr__(self) -> str:
        """Show the entries in the published form, ``{"[m, k, n]": chunks}``."""
        return repr({str(list(key)): value for key, value in self._entries})


def require(option: str, value: object, allowed: bool, what: str) -> None:
    """Raise `SettingsError` unless the value is `allowed`; the message says `what` to give instead."""
    if not allowed:
        raise SettingsError(f"{option}={shown(value)} is not allowed: give {what}")


def whole_number(option: str, value: object) -> int:
    """Return the value if it is a number of chunks; raise `SettingsError` otherwise."""
    allowed = type(value) is int and 1 <= value <= MAX_CHUNKS
    what = f"a whole number of chunks from 1 (off) to {MAX_CHUNKS}, such as 1, 2, 4 or 8"
    require(option, value, allowed, what + (", or auto" if option in ("num_chunks", "COC_PARALLEL_NUM") else ""))
    assert isinstance(value, int)
    return value


def _cut(option: str, value: object) -> Cut:
    """Return a number of chunks, or the rows of each chunk: all but the last multiples of 16."""
    if not isinstance(value, (list, tuple)):
        return whole_number(option, value)
    sizes = tuple(value)
    allowed = 1 <= len(sizes) <= MAX_CHUNKS and all(type(size) is int and size > 0 for size in sizes)
    allowed = allowed and all(size % 16 == 0 for size in sizes[:-1])
    require(option, value, allowed, "a number of chunks, or the rows of each, all but the last multiples of 16")
    return sizes


def _items(entries: object) -> list[tuple[Any, Any]]:
    if entries is None:
        return []
    if not isinstance(entries, Mapping):
        what = 'a table of shapes and chunk counts such as {"[16384, 5120, 1920]": 8}'
        raise SettingsError(f"customized_coc={shown(entries)} is not allowed: give {what}")
    return list(entries.items())


def _shape_key(key: object) -> Shape:
    shape = key
    if isinstance(key, str):
        try:
            shape = json.loads(key)
        except (ValueError, RecursionError):
            shape = None
    sizes = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
        raise SettingsError(f'customized_coc key {shown(key)} is not allowed: give "[m, k, n]", whole numbers above 0')
    return sizes[0], sizes[1], sizes[2]
