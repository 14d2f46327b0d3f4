"""Tests against a real vLLM run in an environment of their own: make test-vllm."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
