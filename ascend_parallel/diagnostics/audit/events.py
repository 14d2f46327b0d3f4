"""Read the events of a trace in Chrome's format, as torch's, Ascend's and msprof's profilers write it, as a stream."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any

# An event's fields as the file has them.
RawEvent = dict[str, Any]
# What a trace says beside its events: read whole, so it has to be small.
ABOUT = ("distributedInfo", "deviceProperties", "baseTimeNanoseconds", "schemaVersion")
# Events between two reports of progress.
STRIDE = 50_000


class ProfileError(ValueError):
    """A profile that cannot be read; the message names the file and what is wrong with it."""


@dataclass
class TraceFile:
    """A trace on disk: an object with ``traceEvents``, or a bare list of events; plain or gzip.

    about
        What it says beside the events, after they were read.
    cut_off
        Why it ends early; empty if it is complete.
    """

    path: Path
    progress: Callable[[str], None] = lambda _: None
    about: dict[str, Any] = field(default_factory=dict)
    cut_off: str = ""

    def events(self) -> Iterator[RawEvent]:
        """Yield the events in the file's order; a file that ends in the middle yields those before its end.

        Raises `ProfileError` for a file that is no trace.
        """
        try:
            import ijson
        except ImportError as error:
            raise ProfileError("audit reads traces with ijson, which is not installed: pip install ijson") from error
        count, cut = 0, (ijson.JSONError, EOFError, zlib.error, gzip.BadGzipFile)
        try:
            prefix = self._read_about(ijson)
            with self._opened() as file:
                for count, event in enumerate(ijson.items(file, prefix, use_float=True), start=1):
                    if count % STRIDE == 0:
                        self.progress(f"{self.path.name}: {count:,} events")
                    if isinstance(event, dict):
                        yield event
        except cut as error:
            if not count:
                raise ProfileError(f"{self.path}: no trace in JSON ({error})") from error
            self.cut_off = f"{self.path.name} ends in the middle: {count:,} events were read"

    def _opened(self) -> IO[bytes]:
        raw = self.path.open("rb")
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        return gzip.open(raw) if packed else raw  # type: ignore[return-value]

    def _read_about(self, ijson: Any) -> str:
        """Keep what stands before the events, and return the prefix of an event: torch writes the ranks there."""
        builder, name = None, ""
        with self._opened() as file:
            for prefix, kind, value in ijson.parse(file, use_float=True):
                if prefix == "" and kind == "start_array":
                    return "item"
                if prefix == "traceEvents" and kind == "start_array":
                    return "traceEvents.item"
                if builder is None and prefix in ABOUT:
                    builder, name = ijson.ObjectBuilder(), prefix
                if builder is not None:
                    builder.event(kind, value)
                    if prefix == name and kind not in ("start_map", "start_array", "map_key"):
                        self.about[name], builder = builder.value, None
        raise ProfileError(f"{self.path}: it has no traceEvents and is no list of events: it is no trace")


def nanoseconds(value: object) -> int:
    """Return microseconds, a number or a decimal string as Ascend writes it, in nanoseconds.

    A float of microseconds since 1970 has a step of 0.25 us.
    """
    if isinstance(value, str):
        with suppress(InvalidOperation, ValueError, OverflowError):
            return int(Decimal(value.strip()) * 1000)
    if isinstance(value, (int, float)):
        with suppress(ValueError, OverflowError):
            return round(value * 1000)
    raise ProfileError(f"a time of {value!r} is no number of microseconds")


def read_json(path: Path) -> Any:
    """Return the value of a small JSON file; raises `ProfileError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: {error}") from error
