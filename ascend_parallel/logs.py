"""What the logger "ascend_parallel" shows: nothing of the program's own logging is touched.

Where the program has configured logging, its handlers get the records. Where it has not, warnings would go to standard
error without a name; a handler of our own writes them there with one, and keeps silent as soon as anybody else listens.
"""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("ascend_parallel")


class Fallback(logging.Handler):
    """Writes to standard error what no other handler would get."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, unless somebody listens: looked at each time, since programs configure logging late."""
        others = [handler for handler in log.handlers if handler is not self]
        if not others and not (log.propagate and logging.root.handlers):
            sys.stderr.write(f"ascend_parallel: {self.format(record)}\n")


class LogLevel:
    """The level that COC_LOG_LEVEL asks for, and the one that was there before."""

    def __init__(self) -> None:
        """See to it that there is a fallback, once in a process."""
        self._before: int | None = None
        if not any(isinstance(handler, Fallback) for handler in log.handlers):
            log.addHandler(Fallback())

    def follow(self, level: str | None) -> None:
        """Set the level, or put back the one that was there before the first that was set."""
        if level is not None:
            self._before = log.level if self._before is None else self._before
            log.setLevel(level.upper())
        elif self._before is not None:
            log.setLevel(self._before)
            self._before = None
