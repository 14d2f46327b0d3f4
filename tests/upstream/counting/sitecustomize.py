"""Write a line for each call that an operator counts. `suite.py` puts this folder on the path of a run's processes.

A rank is a process that a test starts and may kill, so nothing waits for its exit.
"""

import os
from pathlib import Path

import wrapt

FOLDER = Path(os.environ["COUNTED_CALLS"])


@wrapt.when_imported("ascend_parallel.ops.counts")
def write_calls(counts):
    def add(wrapped, _instance, args, kwargs):
        wrapped(*args, **kwargs)
        operator, chunks, _collectives = args
        with (FOLDER / str(os.getpid())).open("a") as lines:
            lines.write(f"{operator} {chunks}\n")

    wrapt.wrap_function_wrapper(counts, "Counts.add", add)
