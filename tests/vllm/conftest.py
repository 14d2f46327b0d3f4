"""Tests against a real vLLM run in an environment of their own: make test-vllm."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Two ranks for all tests of the session, and a folder of vLLM's caches which is empty at first."""
    from ranks import Ranks

    folder = tmp_path_factory.mktemp("pair")
    ranks = Ranks(2, folder, VLLM_CACHE_ROOT=folder / "cache")
    yield ranks
    ranks.end()
