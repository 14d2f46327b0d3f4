"""The agreements of ranks about chunks that keep the bits, noted on their way."""

import contextlib
from unittest import mock

from ascend_parallel.ops import bits


@contextlib.contextmanager
def agreements():
    """Note each message of the probe: how many matmuls were asked about, with none on a device's way."""
    asked, usual = [], bits.store_all_gather

    def noting(group, place, value, *others, **options):
        asked.append(len(value.get("firsts", ())))
        return usual(group, place, value, *others, **options)

    with mock.patch.object(bits, "store_all_gather", noting):
        yield asked
