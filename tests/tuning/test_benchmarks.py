"""The scripts of benchmarks/ run; no test checks a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from ascend_parallel.ops import shm

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST = {
    "buckets.py": ("--rounds", "1"),
    "fused.py": ("--rounds", "1", "--shapes", "64,16,32"),
    "host_cost.py": ("--rounds", "1", "--calls", "1", "--chunks", "2", "4"),
    "host_time.py": ("--rounds", "1", "--blocks", "2"),
    "region.py": ("--rounds", "1", "--shapes", "64,32", "--chunks", "2"),
    "recompute.py": ("--rounds", "1", "--ranks", "1"),
    "sharding.py": ("--rounds", "1"),
    "timeline_cost.py": ("--rounds", "1"),
    "training.py": [
        "--rounds",
        "1",
        "--hidden",
        "48",
        "--layers",
        "1",
        "--seq",
        "32",
        "--batch",
        "1",
        "--chunks",
        "2,2 region",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALLEST)
def test_a_benchmark_prints_its_table(script):
    if script == "fused.py" and isinstance(shm.extension(), str):
        pytest.skip("the C++ extension is not built")
    words = [sys.executable, str(FOLDER / script), *SMALLEST[script]]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ("| --- |" in ended.stdout) or script == "timeline_cost.py"
    assert len(ended.stdout.splitlines()) >= 3


def test_a_wrong_link_is_an_error_in_one_line():
    words = [sys.executable, str(FOLDER / "buckets.py"), "--link", "fast"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("buckets.py: the rate 'fast' is not allowed")
