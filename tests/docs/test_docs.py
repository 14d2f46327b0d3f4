"""What the documentation shows is what the package does."""

import ast
import doctest
import functools
import importlib.util
import re
from pathlib import Path

import published_gains
import pytest
import typer
from typer.testing import CliRunner

import ascend_parallel
from ascend_parallel import settings, sharding, training
from ascend_parallel.cli.app import app
from ascend_parallel.ops import registry
from ascend_parallel.training.graph_passes import PASSES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if ">>>" in path.read_text()))
def test_examples_in_the_documentation(page):
    blocks = re.findall(r"```pycon\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page, page, 0)
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_kernel_has_a_column():
    header = next(line for line in (DOCS / "kernels.md").read_text().splitlines() if line.startswith("| |"))
    assert [cell.strip(" `") for cell in header.strip("|").split("|")][1:] == list(registry.KERNELS)


def test_every_setting_is_documented():
    text = (DOCS / "settings.md").read_text()
    missing = [name for name in settings.Settings().as_dict() if f"`{name}`" not in text]
    missing += [name for name in settings.KNOWN_VARIABLES if f"`{name}`" not in text]
    assert missing == []


def test_the_files_of_twelve_changes_are_there_with_the_names_that_are_said():
    text = (DOCS / "architecture.md").read_text()
    section = text[text.index("## Where a change goes") : text.index("## Rooms")]
    steps = [step.split("\n\n")[0] for step in re.split(r"\n(?=\d\. )", section)[1:]]
    assert len(re.findall("^### ", section, re.MULTILINE)) == 12 and len(steps) > 36
    for step in steps:
        spans = re.findall(r"`([^`<>*()]+)`", step)
        places = [span for span in spans if re.fullmatch(r"\S+(\.py|\.md|\.toml|/)", span)]
        found = {
            place: [path for room in (ROOT, ROOT / "ascend_parallel") if (path := room / place).exists()]
            for place in places
        }
        assert [place for place, paths in found.items() if not paths] == [], step
        texts = [path.read_text() for paths in found.values() for path in paths[:1] if path.is_file()]
        names = [span for span in spans if re.fullmatch(r"[A-Z][A-Z_]{4,}", span)]
        assert [name for name in names if places and not any(name in text for text in texts)] == [], step


@pytest.mark.parametrize(
    "page", ["README.md", "README.zh.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))]
)
def test_there_is_one_way_to_install_with_the_extension(page):
    """What pip builds where it cannot see torch lacks the C++ extension: the READMEs say so, beside the plain way."""
    text = (DOCS.parent / page).read_text()
    of_the_source = [line for line in text.splitlines() if re.search(r"pip install [^`]*(\s|\")\.(\s|\[|`|$)", line)]
    plain = [line for line in of_the_source if "pip install --no-build-isolation" not in line]
    if page.startswith("README"):  # the quick starts have a link to it
        assert len(plain) == 1 and "pip install --no-build-isolation ." in text and "C++" in text
    else:
        assert plain == []


@pytest.fixture(name="promises", scope="module")
def script_of_promises():
    spec = importlib.util.spec_from_file_location("promises", DOCS / "promises.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_each_promise_names_the_tests_that_are_marked_with_it(promises):
    text, tests = promises.PAGE.read_text(encoding="utf-8"), promises.tests_by_promise()
    assert len(tests) > 80
    assert promises.page(text, tests) == text, "run python docs/promises.py"
    table_rows = [line for line in text.splitlines() if re.match(r"\| (?!promise \||<a id=)", line)]
    assert table_rows == [], "a row has no name"


def test_a_promise_without_a_test_and_a_mark_without_a_promise_are_errors(promises):
    row = '| <a id="kept"></a>Bits are kept | always | |\n'
    assert promises.page(row, {"kept": ["a.py::b"]}) == '| <a id="kept"></a>Bits are kept | always | `a.py::b` |\n'
    with pytest.raises(ValueError, match=r"no test is marked promise\('kept'\)"):
        promises.page(row, {})
    with pytest.raises(ValueError, match=r"no row for promise\('other'\) in c.py::d"):
        promises.page(row, {"kept": ["a.py::b"], "other": ["c.py::d"]})
    with pytest.raises(ValueError, match="two rows are named 'kept'"):
        promises.page(row + row, {"kept": ["a.py::b"]})


def test_each_file_of_tests_says_what_it_is_for(promises):
    files = [*promises.TESTS.rglob("test_*.py"), *(promises.TESTS / "support").glob("*.py")]
    silent = [file for file in files if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))]
    assert silent == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("page", "command"),
    [
        (
            "architecture.md",
            "ascend-parallel propagate examples/sharding/mlp.py:small --mesh mp=2"
            " --config examples/sharding/mlp.toml --instructions",
        ),
        ("predict.md", "python benchmarks/published_gains.py"),
    ],
)
def test_a_listing_is_what_the_command_prints(monkeypatch, page, command):
    monkeypatch.chdir(DOCS.parent)
    listing = rf"^```\w*\n\$ {re.escape(command)}\n(.*?)^```$"
    (shown,) = re.findall(listing, (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    program, *words = command.split()
    as_redirected = CliRunner(env={"COLUMNS": None})  # pytest gives processes that test beside each other its own
    if program == "python":
        shown_by = typer.Typer()
        shown_by.command()(published_gains.main)
        printed = as_redirected.invoke(shown_by, words[1:])
    else:
        printed = as_redirected.invoke(app, words)
    assert printed.exit_code == 0, printed.output
    assert [line.rstrip() for line in printed.stdout.splitlines()] == shown.splitlines()


def test_the_table_and_the_picture_of_rooms_are_those_of_the_code():
    pytest.importorskip("grimp", reason="import-linter is not installed")
    pytest.importorskip("tomllib", reason="Python is older than 3.11")
    spec = importlib.util.spec_from_file_location("draw_architecture", DOCS / "images" / "draw_architecture.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    text = drawing.PAGE.read_text(encoding="utf-8")
    assert drawing.page(text) == text, "run python docs/images/draw_architecture.py"
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.picture()


def test_every_name_of_the_vocabulary_is_one_of_ours():
    rooms = {"sharding": sharding, "training": training, "ops": ascend_parallel.ops}
    rows = [line for line in (DOCS / "vocabulary.md").read_text().splitlines() if line.startswith("| ")]
    named = [re.findall(r"`((?:sharding|training|ops)\.[\w.]+)`", row.split(" | ")[0]) for row in rows]
    named = [name for names in named for name in names]
    assert len(named) > 20
    for name in named:
        room, *rest = name.split(".")
        assert functools.reduce(getattr, rest, rooms[room]) is not None, name


def test_the_passes_of_the_vocabulary_are_those_of_the_package():
    (line,) = (line for line in (DOCS / "vocabulary.md").read_text().splitlines() if "`fused_passes`" in line)
    assert set(re.findall(r"`(\w+)`", line.split("|")[1])) - {"fused_passes"} == set(PASSES)
