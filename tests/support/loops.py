"""The two loops of a chunked call: the C++ extension's, and Python's."""

import contextlib
from unittest import mock

from ascend_parallel.ops import chunk_loop

REASON = chunk_loop.LOOP if isinstance(chunk_loop.LOOP, str) else ""
NATIVE, PYTHON = "C++", "Python"
LOOPS = [NATIVE, PYTHON]  # without the extension Python's loop runs for both


@contextlib.contextmanager
def loop_of(name):
    """Run what a loop in C++ covers by it, or everything by Python's; yields the C++ loops that ran."""
    own, made = chunk_loop.LOOP, []

    def make(group):
        made.append(own(group))
        return made[-1]

    with mock.patch.object(chunk_loop, "LOOP", "a test" if name == PYTHON else own if REASON else make):
        yield made
