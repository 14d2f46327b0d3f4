"""Lines of progress: on a terminal, on no other output, and not beside JSON."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import forked_python
from profiles import of_gpu
from profiles import write as write_profile
from timelines import made
from typer.testing import CliRunner

from ascend_parallel import logs
from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.timeline.files import write
from ascend_parallel.logs import working
from ascend_parallel.sharding import TensorShard
from ascend_parallel.training.checkpoint import save

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = f"{EXAMPLES}/sharding/llama.py:small"
MLP = """import torch

def mlp():
    layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
    return torch.nn.Sequential(*layers), (torch.zeros(64, 256),)
"""


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


TIMED = ("--shape", "64,32,32", "--rounds", "3", "--chunks", "2", "--layer", "row")
PLANNED = f"{EXAMPLES}/strategy/train.py:planned"
# The commands that may take longer than two seconds, with what they show meanwhile; {folder} is a temporary folder.
LONG = [
    (("doctor",), "examining"),
    (("propagate", MODEL, "--mesh", "mp=2", "--brief"), "tracing"),
    (("propagate", "{folder}/model.py:mlp", "--mesh", "mp=2", "--advise"), "propagation "),
    (("strategy", PLANNED, "--config", f"{EXAMPLES}/strategy/gpt.toml"), "planning"),
    (
        ("plan-training", "--model", PLANNED, *("--ranks", "2", "--memory", "1GB"), "--out", "{folder}/strategy.toml"),
        "tracing",
    ),
    (("predict", "--model", "llama2-7b"), "predicting"),
    (("bench", *TIMED), "starting the ranks"),
    (("timeline", "{folder}/spans", "--no-png"), "merging"),
    (("audit", "{folder}/trace.json"), "reading"),
    (("checkpoint", "show", "{folder}/saved"), "comparing checksums"),
    (("checkpoint", "convert", "{folder}/saved", "{folder}/whole.pt", "--to", "torch"), "converting"),
    (("checkpoint", "diff", "{folder}/saved", "{folder}/saved"), "comparing"),
]


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    """Ranks that a command starts begin with torch imported."""
    monkeypatch.setattr(sys, "executable", forked_python())


@pytest.fixture
def folder(tmp_path):
    """A temporary folder with a model, a timeline, a profile and a checkpoint."""
    write_profile(tmp_path / "trace.json", of_gpu())
    (tmp_path / "model.py").write_text(MLP)
    (tmp_path / "spans").mkdir()
    for rank in range(2):
        write(tmp_path / "spans", *made(rank, steps=3))
    whole = {"layers.0.weight": TensorShard.whole(torch.zeros(4, 4))}
    save(tmp_path / "saved", step=12, model=whole, optimizer={}, values={})
    return tmp_path


SLOW = ("doctor", "predict", "bench", "plan-training", "strategy", "--advise")
CASES = [
    pytest.param(words, expected, id=" ".join(words[:1] + words[-1:]).replace("{folder}/", ""), marks=marks)
    for words, expected in LONG
    for marks in [[pytest.mark.slow] if {*SLOW} & {*words} else []]
]


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_a_command_shows_progress_on_a_terminal_but_not_elsewhere(words, expected, folder, monkeypatch):
    words = [word.replace("{folder}", str(folder)) for word in words]
    written = folder / "whole.pt"
    if not {*SLOW} & {*words}:  # one console decides for all commands
        piped = CliRunner().invoke(app, words)
        written.unlink(missing_ok=True)
        assert (piped.stderr.strip(), piped.exit_code in (0, 1)) == ("", True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    shown = CliRunner().invoke(app, words)
    written.unlink(missing_ok=True)
    assert expected in shown.stderr
    silent = CliRunner().invoke(app, [*words, "--json"])
    assert silent.stderr == ""
    assert isinstance(json.loads(silent.stdout), dict)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_real_terminal_gets_progress_unless_json_is_asked_for(more):
    """A process with a pseudo-terminal as its output: the line is shown, and erased at the end."""
    ours, theirs = pty.openpty()
    command = [forked_python(), "-m", "ascend_parallel", "propagate", MODEL, "--mesh", "mp=2", "--brief", *more]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=120)
    shown = terminal_text(ours)
    assert process.returncode == 0
    assert b"\x1b[" not in out
    if more:
        assert (shown, isinstance(json.loads(out), dict)) == ("", True)
    else:
        assert "tracing" in shown
        assert shown.endswith("\x1b[2K")  # erases the line


def terminal_text(terminal):
    """Return what was written to a pseudo-terminal, whose other end is closed."""
    found = b""
    try:
        while more := os.read(terminal, 1 << 16):
            found += more
    except OSError:  # Linux says so at the end
        pass
    os.close(terminal)
    return found.decode()


@pytest.mark.slow
def test_advice_has_json_too(tmp_path):
    (tmp_path / "model.py").write_text(MLP.replace("64, 256", "65536, 256"))
    words = ["propagate", f"{tmp_path}/model.py:mlp", "--mesh", "mp=2", "--advise", "--json"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert [(advised["pattern"], advised["count"]) for advised in found["advised"]] == [("0", 1)]
    assert found["alone_seconds"] > found["seconds"] > 0


@pytest.mark.parametrize(
    ("stream", "shown", "level", "expected"),
    [
        (Terminal(), True, "WARNING", "\r\x1b[Kascend_parallel: timing forward ...\r\x1b[K"),
        (Terminal(), False, "WARNING", ""),
        (Terminal(), True, "ERROR", ""),
        (io.StringIO(), True, "WARNING", ""),
    ],
)
def test_a_run_shows_that_it_tunes_on_a_terminal_and_erases_the_line(monkeypatch, stream, shown, level, expected):
    monkeypatch.setattr("sys.stderr", stream)
    before = logs.log.level
    logs.log.setLevel(level)
    try:
        with working("timing forward", shown=shown):
            pass
    finally:
        logs.log.setLevel(before)
    assert stream.getvalue() == expected
