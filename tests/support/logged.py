"""What the package logs on this rank while a block runs: `with logged() as lines`."""

import contextlib
import logging


@contextlib.contextmanager
def logged(read=logging.LogRecord.getMessage):
    """Collect `read(record)` of each record of the package's logger."""
    lines, handler, logger = [], logging.Handler(), logging.getLogger("ascend_parallel")
    handler.emit = lambda record: lines.append(read(record))
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
