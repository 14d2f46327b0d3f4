"""Functions of this package that run in a call, counted without a clock."""

import sys
import threading
from collections import Counter


def of_this_package(frame):
    """Tell whether the package wrote the function: constructors that dataclasses make do not count."""
    written = not frame.f_code.co_filename.startswith("<")
    return written and str(frame.f_globals.get("__name__", "")).startswith("ascend_parallel.")


def functions_of(run):
    """Return the functions of this package that ``run()`` calls, also those that autograd's thread calls."""
    called = Counter()

    def look(frame, event, _):
        if event == "call" and of_this_package(frame):
            called[f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"] += 1

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        result = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return result, called


def in_words(called):
    return f"{sum(called.values())}: " + ", ".join(f"{name} {count}" for name, count in called.most_common(12))
