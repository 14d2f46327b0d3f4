"""Clocks that decide what COC_TUNE and `auto` find, on any machine."""

import contextlib
from unittest import mock

from ascend_parallel.tuning.measured import decider, pass_times


def one_chunk_wins(self, operator, candidates, rounds):
    """A clock by which every cut loses."""
    return {sizes: [float(len(sizes))] * rounds for sizes in candidates}


def two_chunks_win(self, operator, candidates, rounds):
    """A clock by which two chunks win."""
    return {sizes: [1.0 + abs(len(sizes) - 2)] * rounds for sizes in candidates}


def planted(clock):
    """Return a context in which layers are timed by `clock`."""
    return mock.patch.object(pass_times.TimedLinear, "time_sizes", clock)


@contextlib.contextmanager
def auto_cuts_in_two():
    """Have `auto` time every count, by a clock by which two chunks win, whatever a model of the parts expects."""
    with planted(two_chunks_win), mock.patch.object(decider, "confirmed", decider.measured):
        yield
