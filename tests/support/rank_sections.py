"""Sections of a report that fail, for tests: on their ranks."""

import os
import time

from ascend_parallel.tuning.launch.ranks import call_on_ranks

# Variables that the failing rank quotes in its error.
FAILING = ("USER", "LOGNAME", "HOSTNAME", "HOME", "SLURMD_NODENAME", "ASCEND_HOME_PATH", "CXX", "HTTPS_PROXY")
FAILING += ("API_TOKEN",)


def fails(request, limit):
    """A section whose second rank raises an error that quotes the environment."""
    return call_on_ranks("rank_sections:raise_on_one", request.ranks, limit=limit)


def hangs(request, limit):
    """A section whose second rank does not return."""
    return call_on_ranks("rank_sections:sleep_on_one", request.ranks, limit=limit)


def raise_on_one(group):
    if group.rank() == 1:
        raise RuntimeError("; ".join(os.environ[name] for name in FAILING))


def sleep_on_one(group):
    if group.rank() == 1:
        time.sleep(600)
