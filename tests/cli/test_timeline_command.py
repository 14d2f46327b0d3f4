"""The command `ascend-parallel timeline`, and its errors for missing or damaged files."""

import json
import re
import sys
from pathlib import Path

import pytest
from timelines import made
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.timeline.files import write


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        write(tmp_path, *made(rank, steps=3))
    return tmp_path


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["timeline", *(str(argument) for argument in arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_and_shows(folder):
    code, out, _ = run(folder, "--no-png")
    assert code == 0
    assert "mlp.<fc2>" in out
    assert "40.00" in out
    page = (Path(__file__).parents[2] / "docs/timeline.md").read_text()
    for name in re.search(r"T  .*", out)[0].split():  # the table's header
        (line,) = re.findall(rf"^{name}: .+$", out, re.MULTILINE)
        assert line in page
    assert {path.name for path in folder.iterdir() if path.suffix != ".jsonl"} == {"trace.json", "report.html"}
    code, out, _ = run(folder, "--json", "--no-png", "--out", folder / "elsewhere")
    assert code == 0
    told = json.loads(out)
    assert told["layers"][0]["e_bound"] == pytest.approx(0.5)
    assert told["written"] == [str(folder / "elsewhere" / name) for name in ("trace.json", "report.html")]


def test_beside_a_serial_run_it_says_where_overlap_lost(folder, tmp_path):
    serial = tmp_path / "serial"
    for rank in range(2):
        write(serial, *made(rank, chunks=1))
    code, out, _ = run(folder, "--against", serial, "--no-png", "--out", tmp_path / "shown")
    assert code == 0
    assert "note: overlap loses here: 1 of 1 passes" in out
    assert re.search(r"serial +E_bound", out)
    assert "note: overlap" not in run(folder, "--no-png", "--out", tmp_path / "shown")[1]
    told = json.loads(run(folder, "--against", serial, "--json", "--no-png", "--out", tmp_path / "shown")[1])
    (row,) = told["layers"]
    assert (row["serial"], row["e_bound"], row["lost"]) == (25, 0, True)
    assert len(told["notes"]) == 1


@pytest.mark.slow
def test_the_picture(folder):
    pytest.importorskip("matplotlib")
    code, _, _ = run(folder, "--png")
    assert code == 0
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_its_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(folder, "--png")
    assert code == 2
    assert "pip install matplotlib, or give --no-png" in err
    assert not list(folder.glob("*.png"))


def test_missing_ranks_are_named(folder):
    (folder / "timeline-20260101-000000-abcd-rank0.jsonl").unlink()
    code, out, _ = run(folder, "--no-png")
    assert code == 0
    assert "of 2 ranks, the files of rank 0 are missing" in out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: '{"other": 1}\n', "is not a file of an ascend_parallel timeline"),
        (lambda text: "[1]\n", "is not a file of an ascend_parallel timeline"),
        (lambda text: "", "cannot be read"),
        (lambda text: "\x00\xff", "cannot be read"),
        (lambda text: text.replace('"version":1', '"version":99'), "has version 99 of the format"),
        (lambda text: text.replace('"ranks":2', '"ranks":"two"'), "line 1, is damaged: ranks='two'"),
        (lambda text: text[:-40], r"line 4, is damaged \(JSONDecodeError"),
        (lambda text: text.replace('"begin"', '"began"'), r"line 2, is damaged \(KeyError: 'begin'"),
        (lambda text: text.replace('["comm"', '["magic"'), r"line 2, is damaged \(ValueError: a span has an unknown"),
        (lambda text: text.replace('"begin":0', '"begin":"0"'), r"line 2, is damaged \(ValueError: a time"),
    ],
)
def test_damaged_files_are_named_and_kept(folder, damage, message):
    path = folder / "timeline-20260101-000000-abcd-rank1.jsonl"
    damaged = damage(path.read_text())
    path.write_text(damaged)
    code, _, err = run(folder)
    assert code == 2
    assert re.search(rf"rank1\.jsonl.*{message}", err)
    assert path.read_text() == damaged
    assert not list(folder.glob("*.html"))


def test_no_folder_and_an_empty_one(tmp_path):
    code, _, err = run(tmp_path / "none")
    assert (code, "no such folder" in err) == (2, True)
    code, _, err = run(tmp_path)
    assert code == 2
    assert f"run with COC_TIMELINE={tmp_path}" in err
