"""Output and errors of ascend-parallel predict, and the tables of docs/predict.md."""

import json
from pathlib import Path

import published_gains
import pytest
import typer
from typer.testing import CliRunner

from ascend_parallel.cli import predict as command
from ascend_parallel.tuning import cost_model
from ascend_parallel.tuning.cost_model.hardware import all_hardware
from ascend_parallel.tuning.cost_model.models import all_models

DOCUMENT = Path(__file__).parents[2] / "docs" / "predict.md"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command(help=command.EXAMPLES)(command.predict)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_the_command_prints_tables_and_json(run):
    words = ("--model", "llama2-70b", "--tp", "8", "--hardware", "910b", "--seq", "4096", "--micro-batch", "2")
    text = run(*words)
    assert text.exit_code == 0
    for expected in ("matmul_reduce_scatter", "llama2-70b (69.0B) on ascend-910b2", "best equal", "bound", "assumed"):
        assert expected in text.output
    found = json.loads(run(*words, "--json").output)
    assert found["ranks"] == 8 and len(found["calls"]) == 10
    for call in found["calls"]:
        assert call["bound"] <= call["best"] <= call["serial"] <= call["in_turn"] * (1 + 1e-9)
        assert sum(call["sizes"]) == call["rows"]


def test_the_command_predicts_a_shaped_link(run):
    words = ("--model", "llama2-7b", "--tp", "2", "--hardware", "cpu-gloo", "--seq", "512", "--json")
    slow, fast = (json.loads(run(*words, "--link", rate).output) for rate in ("100mbit", "10gbit"))
    assert slow["layer"]["serial"]["forward"] > fast["layer"]["serial"]["forward"]
    assert slow["dtype"] == "float32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama2-7o", "--hardware", "910b"), "did you mean llama2-7b?"),
        (("--model", "llama2-7b", "--hardware", "910b5"), "did you mean 910b?"),
        (("--model", "llama2-7b"), "give either --hardware or --hardware-file"),
        (("--hardware", "910b"), "give either --model or --model-file"),
        (("--model", "llama2-7b", "--hardware", "910b", "--tp", "0"), "Invalid value for '--tp'"),
        (("--model", "llama2-7b", "--hardware", "910b", "--recompute", "some"), "none, selective, full"),
        (("--model", "llama2-7b", "--hardware", "910b", "--dtype", "int4"), "--dtype 'int4' is not known"),
        (("--model-file", "/nowhere.toml", "--hardware", "910b"), "cannot be read"),
    ],
)
def test_the_command_refuses_with_what_is_allowed(run, words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_command_lists_what_exists_and_its_sources(run):
    listed = run("--list").output
    assert all(name in listed for name in (*all_models(), *all_hardware()))
    sources = run("--hardware", "910b", "--sources").output
    assert "cube_core_cnt" in sources and "[[65536, " in sources


def test_help_shows_examples(run):
    assert "--model llama2-70b --tp 8 --hardware 910b" in " ".join(run("--help").output.replace("│", "").split())


@pytest.mark.slow
def test_the_document_has_the_tables_that_the_command_prints():
    text = DOCUMENT.read_text(encoding="utf-8")
    made = published_gains.inserted(text, published_gains.tables())
    assert made == text, "run python docs/published_gains.py docs/predict.md"


def test_the_published_gains_changed_no_number():
    """Published gains are in docs/ only, not in data that the model reads."""
    paths = list(Path(cost_model.__file__).parent.glob("data/**/*.toml"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not any(gain in text for gain in ("3.20", "5.47", "7.85"))
