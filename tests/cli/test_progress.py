"""Lines of progress: on a terminal, on no other output, and not beside JSON."""

import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ascend_parallel import logs
from ascend_parallel.cli.app import app
from ascend_parallel.logs import working

MODEL = f"{Path(__file__).parents[2]}/examples/sharding/llama.py:small"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("words", [("doctor",), ("propagate", MODEL, "--mesh", "mp=2", "--brief")])
def test_a_command_shows_progress_on_a_terminal_but_not_beside_json(words, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    shown = CliRunner().invoke(app, list(words))
    assert "examining" in shown.stderr or "propagating" in shown.stderr
    silent = CliRunner().invoke(app, [*words, "--json"])
    assert silent.stderr == ""
    assert isinstance(json.loads(silent.stdout), dict)


def test_without_a_terminal_a_command_shows_no_progress(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert CliRunner().invoke(app, ["doctor"]).stderr.strip() == ""


def test_advice_has_json_too():
    words = ["propagate", MODEL, "--mesh", "mp=2", "--advise", "--json"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert "layers.*.mlp.down" in {advised["pattern"] for advised in found["advised"]}
    assert found["seconds"] > 0


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
