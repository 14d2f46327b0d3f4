"""The scripts of benchmarks/ run; no test checks a time."""

import json
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
    "region.py --graph": ("--rounds", "1", "--shapes", "256,128", "--chunks", "2"),
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
    name, *flags = script.split()
    words = [sys.executable, str(FOLDER / name), *flags, *SMALLEST[script]]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ("| --- |" in ended.stdout) or script == "timeline_cost.py"
    assert len(ended.stdout.splitlines()) >= 3


def test_a_wrong_link_is_an_error_in_one_line():
    words = [sys.executable, str(FOLDER / "buckets.py"), "--link", "fast"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("buckets.py: the rate 'fast' is not allowed")


@pytest.mark.parametrize(
    ("again", "kept", "expected"),
    [
        ({"serial": [2.0]}, [64], "none of 1 passes is overlapped; all keep one chunk."),
        ({"serial": [2.0], "2 chunks": [3.0]}, [64], "none of 1 passes is overlapped; all keep one chunk."),
        ({"serial": [2.0], "2 chunks": [1.0]}, [32, 32], "1 of 1 passes are overlapped, from 2.00 to 2.00 times"),
    ],
)
def test_the_summary_of_predictions_says_how_many_passes_keep_chunks(tmp_path, again, kept, expected):
    parts = {
        "rows": 64,
        "count": 8,
        "matmul": 1.0,
        "matmul_piece": 0.2,
        "latency": 0.1,
        "collective": 1.0,
        "pieces": 1.0,
    }
    shape = {"run": "forward", "operator": "matmul_all_reduce", "m": 64, "k": 32, "n": 16}
    sizes = {"serial": [64], "2 chunks": [32, 32]}
    times = {"serial": [2.0], "2 chunks": [1.8]}
    row = {**shape, "kind": "row", "sequence_parallel": False, "parts": parts, "sizes": sizes, "times": times}
    file = tmp_path / "prediction.json"
    file.write_text(json.dumps({"1gbit": {"passes": [{**row, "again": again, "kept": kept}]}}))
    words = [sys.executable, str(FOLDER / "prediction.py"), "--table", str(file)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert f"Kept after the second timing: {expected}" in ended.stdout
    assert "timed together in none of 1 passes" in ended.stdout
