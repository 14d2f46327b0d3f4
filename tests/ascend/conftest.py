"""Tests on the real torch_npu over an emulated CANN run in an environment of their own: make test-ascend."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
here = importlib.util.find_spec("torch_npu") and "emulated_ascend" in os.environ.get("LD_LIBRARY_PATH", "")
collect_ignore_glob = [] if here else ["test_*.py"]
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
if here:
    from emulated_ascend.ranks import preload

    # What frameworks import, not the frameworks: a rank imports those after this package, as a program does.
    preload("wrapt", "scipy.optimize", "torch.export._trace", "torch._inductor.compile_fx", "torch.distributed.fsdp")


@pytest.fixture(scope="session")
def ranks():
    """`ranks(count=2, backend="hccl", **variables)`: ranks that begin with these variables, kept for later tests.

    So many kinds are kept, those that were used last: torch_npu's threads of a rank take processor time while it waits.
    """
    from emulated_ascend.ranks import Ranks

    made, most = {}, 3

    def pool(count=2, backend="hccl", **variables):
        key = (count, backend, *sorted(variables.items()))
        found = made.pop(key, None)
        if found is None or not found.alive:
            while len(made) >= most:
                made.pop(next(iter(made))).close()
            found = Ranks(count, variables, backend, 150)
        made[key] = found  # the last
        return found

    yield pool
    for each in made.values():
        each.close()
