"""The figures of the README and of docs/measured.md are those of benchmarks/data/figures.json."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
from marks import promise
from typer.testing import CliRunner

from ascend_parallel.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import figures

    yield figures
    sys.modules.pop("figures")


def stored():
    return json.loads((ROOT / "benchmarks" / "data" / "figures.json").read_text())


@promise("readme-figures")
@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/measured.md", "docs/measured.zh.md"])
def test_a_page_has_what_was_measured(figures, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert figures.with_figures(page, text, stored()) == text, "python benchmarks/figures.py --write"


@pytest.mark.parametrize(
    ("page", "theirs", "edited"),
    [("docs/measured.md", r"(\d+) ms, 1", "1"), ("README.md", r"\*\*(1\.\d\d) times", "2.00")],
)
def test_an_edited_figure_is_found(figures, page, theirs, edited):
    text = (ROOT / page).read_text(encoding="utf-8")
    place = re.search(theirs, text).span(1)
    changed = text[: place[0]] + edited + text[place[1] :]
    assert figures.with_figures(page, changed, stored()) == text
    assert changed != text


def test_every_row_has_its_machine_date_and_commit(figures):
    rows = {f"{name}, {result}" for name, benchmark in figures.BENCHMARKS.items() for result in benchmark.rows}
    assert set(stored()) == rows
    for row in stored().values():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) and re.fullmatch(r"[0-9a-f]{7,40}", row["commit"])
        assert row["machine"]


def test_figures_are_those_of_the_times(figures):
    row = figures.figures({"plain": [1.0, 1.2, 1.1], "4": [0.5, 0.6, 0.55]})
    assert row["plain"] == {"ms": 1100}
    assert row["4"] == {"ms": 550, "gain": 2.0, "interval": [2.0, 2.0]}
    changed = copy.deepcopy(stored())
    changed[figures.HEADLINE] |= row
    sentence = figures.headline(figures.ENGLISH, changed)
    assert "2.00 times as fast" in sentence and "550 ms in place of 1100" in sentence


def test_a_readme_without_the_markers_is_refused(figures):
    with pytest.raises(ValueError, match="'headline' have no place"):
        figures.with_figures("README.md", "# ascend_parallel\n", stored())


def test_the_first_page_is_read_in_five_minutes():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len([word for word in words if re.search(r"\w", word)]) < 1250  # lines of tables and of code fences are none


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_predicted_figure_of_the_first_screen_is_what_the_command_says(page):
    told = CliRunner().invoke(app, ["predict", "--model", "llama3-8b", "--tp", "8", "--hardware", "910b", "--json"])
    predicted = json.loads(told.stdout)
    seconds = {name: predicted["step"][name]["total"] for name in ("serial", "best", "bound")}
    text = (ROOT / page).read_text(encoding="utf-8")
    (sentence,) = re.findall(r"^\*\*.*\b8 %.*(?:\n.+)*", text, re.MULTILINE)
    assert all(f"{figure:.2f}" in sentence for figure in seconds.values()), seconds
    assert f"{100 * (seconds['serial'] / seconds['best'] - 1):.0f} %" in sentence
    assert predicted["memory"]["fits"]
