"""Tests of the emulation run in its environment, on the emulated device: make test-ascend."""

import importlib.util
import os

import pytest

here = importlib.util.find_spec("torch_npu") and "emulated_ascend" in os.environ.get("LD_LIBRARY_PATH", "")
collect_ignore_glob = [] if here else ["test_*.py"]


@pytest.fixture(autouse=True)
def working_device():
    """A test that fails on the device leaves the next one a device that works."""
    yield
    from emulated_ascend.kernels.table import loaded

    for library in loaded:
        library.emulated_forget_failure()
