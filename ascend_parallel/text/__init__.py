"""Texts: read and write those of users, shorten values for messages, fill templates, make and fold tables."""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
import reprlib
import secrets
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BLANKS = " \t\r\n"
MOST_BYTES = 4_000_000
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200
_SHOWN.maxlong = 60
_SHOWN.maxdict = _SHOWN.maxlist = _SHOWN.maxtuple = 16


def parse_int(text: str) -> int | None:
    """Return the number written in up to 18 ASCII digits, or None for any other text.

    A leading sign and surrounding blanks are allowed. `int` would also accept digits of every script, underscores and
    numbers of any length, and strips other blanks than `str.strip`.
    """
    plain = text.strip(BLANKS)
    return int(plain) if _WHOLE.fullmatch(plain) else None


def bits_per_second(text: str) -> float | None:
    """Return the rate written as ``1gbit``, ``2.5gbit`` or ``500mbit``, or None for any other text."""
    match = _RATE.fullmatch(text.strip().lower())
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else None


def file_text(path: Path) -> str:
    """Return the text of a file of settings; raises `OSError` for what is no file, or has more than `MOST_BYTES`."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device may have no end
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    if found.st_size > MOST_BYTES:  # a TOML file of 60 MB is parsed for 11 seconds
        raise OSError(errno.EFBIG, f"it has {size_of(found.st_size)}, more than {size_of(MOST_BYTES)}", str(path))
    return path.read_text(encoding="utf-8")


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file atomically: a reader sees the old text or the new one; durable: also after a crash."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text; raises `ValueError`, or `RecursionError` for deep nesting."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values: dict[str, Any] = tomllib.loads(text)
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?``, or a full stop if no name is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def equal_runs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return each text after its place, as "3"; three or more equal ones in a row as one, with "3 to 9"."""
    found: list[tuple[str, str]] = []
    for text, places in itertools.groupby(range(len(texts)), key=lambda place: texts[place]):
        first, *others = places
        if len(others) > 1:
            found.append((f"{first} to {others[-1]}", text))
        else:
            found.extend((str(place), text) for place in (first, *others))
    return found


def shown(value: object) -> str:
    """Return the value's repr; a long repr is cut in the middle."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python refuses to write numbers of more than 4300 digits
        return f"<{type(value).__name__} of thousands of digits>"


def some_of(items: Sequence[object], most: int, rest: str = "more") -> str:
    """Return the first `most` items with commas, and how many others there are."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} {rest}" if len(items) > most else "")


def dtype_name(dtype: object) -> str:
    """Return the name of torch's dtype without its prefix: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def size_of(nbytes: float) -> str:
    """Return bytes as text, such as "25.2 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
