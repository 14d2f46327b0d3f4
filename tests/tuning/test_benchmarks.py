"""The scripts of benchmarks/ run; no test checks a time."""

import csv
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from launch import forked_python

from ascend_parallel.ops import shm

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST = {
    "buckets.py": ("--rounds", "1"),
    "context.py": ("--rounds", "1", "--attention", "--case", "0", "--tokens", "128"),
    "gpu.py --halves --device cpu --parts layers,steps": [
        *("--rounds", "1", "--repeats", "1", "--rows", "64", "--hidden", "32"),
        *("--heads", "4", "--layers", "1", "--batch", "2", "--chunks", "2"),
    ],
    "fused.py": ("--rounds", "1", "--shapes", "64,16,32"),
    "host_cost.py": ("--rounds", "1", "--calls", "1", "--chunks", "2", "4"),
    "host_time.py": ("--rounds", "1", "--blocks", "2"),
    "moe.py": ("--rounds", "3", "--case", "0", "--rows", "64"),
    "plans.py": ("--rounds", "1", "--rivals", "1", "--cases", "MLP, 512 rows"),
    "region.py": ("--rounds", "1", "--shapes", "64,32", "--chunks", "2"),
    "region.py --graph": ("--rounds", "1", "--shapes", "256,128", "--chunks", "2"),
    "recompute.py": ("--rounds", "1", "--ranks", "1", "--length", "32"),
    "sharding.py": ("--rounds", "1", "--rows", "64"),
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
    words = [forked_python(), str(FOLDER / name), *flags, *SMALLEST[script]]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ("| --- |" in ended.stdout) or script == "timeline_cost.py"
    assert len(ended.stdout.splitlines()) >= 3


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Give a function that runs a script in this process, and returns what it prints."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", "")  # scripts that start ranks change it

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [str(FOLDER / name), *map(str, words)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_a_wrong_link_is_an_error_in_one_line(run_here, capsys):
    with pytest.raises(SystemExit) as ended:
        run_here("buckets.py", "--link", "fast")
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("buckets.py: the rate 'fast' is not allowed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "kept", "expected"),
    [
        ({"serial": [2.0]}, [64], "none of 1 passes is overlapped; all keep one chunk."),
        ({"serial": [2.0], "2 chunks": [3.0]}, [64], "none of 1 passes is overlapped; all keep one chunk."),
        ({"serial": [2.0], "2 chunks": [1.0]}, [32, 32], "1 of 1 passes are overlapped, from 2.00 to 2.00 times"),
    ],
)
def test_the_summary_of_predictions_says_how_many_passes_keep_chunks(tmp_path, run_here, again, kept, expected):
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
    printed = run_here("prediction.py", "--table", file)
    assert f"Kept after the second timing: {expected}" in printed
    assert "timed together in none of 1 passes" in printed
    assert printed.startswith(run_here("prediction.py", "--table", file, "--data", tmp_path).strip())
    for name, lines in (("prediction", 2), ("prediction_again", 1)):
        heads, *rows = csv.reader((tmp_path / f"{name}.csv").open(encoding="utf-8"))
        assert heads == next(csv.reader((FOLDER / "data" / f"{name}.csv").open(encoding="utf-8")))
        assert len(rows) == lines
        assert {len(row) for row in rows} == {len(heads)}


def rows_of(name):
    with (FOLDER / "data" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_page_of_predictions_has_the_summary_of_its_rows():
    page = (FOLDER.parent / "docs" / "predicted-and-measured.md").read_text()
    rows, again = rows_of("prediction"), rows_of("prediction_again")
    errors = {id(row): 100 * abs(float(row["predicted"]) / float(row["measured"]) - 1) for row in rows}
    count, middle = re.search(r"- (\d+) passes and cuts: median error ([\d.]+) %", page).groups()
    assert int(count) == len(rows)
    assert float(middle) == pytest.approx(median(errors.values()), abs=0.1)  # the rows' times have one decimal
    table = re.findall(r"^\| (\w+) \| ([\d.]+) % \| (\d+) \| ([\d., ]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [cells[0] for cells in table] == list(dict.fromkeys(row["link"] for row in rows))
    for link, error, kept, gains, _ in table:
        assert float(error) == pytest.approx(median(errors[id(row)] for row in rows if row["link"] == link), abs=0.1)
        found = [float(row["serial / ours"]) for row in again if (row["link"], row["kept"]) == (link, "yes")]
        assert int(kept) == len(found)
        assert [float(gain) for gain in gains.split(", ")] == [min(found), median(found), max(found)]
