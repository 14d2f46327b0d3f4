"""Configure the logger "ascend_parallel" only, not the program's logging.

If the program has configured logging, its handlers get the records. If not, Python would write warnings to standard
error without the logger's name; the handler of this module writes them with the name, and is silent as soon as
another handler exists.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("ascend_parallel")


class Fallback(logging.Handler):
    """Writes records to standard error if there is no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless there is another handler; checked at each record, since programs add handlers late."""
        others = [handler for handler in log.handlers if handler is not self]
        if not others and not (log.propagate and logging.root.handlers):
            sys.stderr.write(f"ascend_parallel: {self.format(record)}\n")


class LogLevel:
    """Sets the logger's level from COC_LOG_LEVEL, and restores the previous level."""

    def __init__(self) -> None:
        """Add the fallback handler, once in a process."""
        self._before: int | None = None
        if not any(isinstance(handler, Fallback) for handler in log.handlers):
            log.addHandler(Fallback())

    def follow(self, level: str | None) -> None:
        """Set the level; None restores the level from before the first level that was set."""
        if level is not None:
            self._before = log.level if self._before is None else self._before
            log.setLevel(level.upper())
        elif self._before is not None:
            log.setLevel(self._before)
            self._before = None


@contextmanager
def working(text: str, *, shown: bool) -> Iterator[None]:
    """Show a line on a terminal's stderr during the block, and erase it; silent elsewhere, and if warnings are off.

    shown: whether this rank shows it.
    """
    if not shown or not sys.stderr.isatty() or not log.isEnabledFor(logging.WARNING):
        yield
        return
    sys.stderr.write(f"\r\x1b[Kascend_parallel: {text} ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
