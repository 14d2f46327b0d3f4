"""What the pages for contributors and GitHub's files name is there: make's targets, tests, and links of all pages."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
WORKFLOWS = ROOT / ".github" / "workflows"


def pages():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def words(path):
    """The text of a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """GitHub's anchors of a page's headings; the site's, of the names of an API page."""
    found = re.findall(r"^::: (\S+)$", words(path), re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", words(path), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def test_every_link_of_every_page_leads_to_a_file_and_a_heading_that_is_there():
    broken, seen = [], 0
    for page in pages():
        for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", words(page)):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            seen += 1
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert seen > 200
    assert broken == []


def names_of(path):
    """The functions and classes that a file of Python defines, and the names that it stores to."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return defined + [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def test_the_names_that_pages_import_are_there():
    """Of this package, and of files: beside a page of an example, in any example of another page."""
    wrong, seen = [], 0
    for page in pages():
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
            if not isinstance(node, ast.ImportFrom) or node.module.startswith(("torch", "megatron.")):
                continue
            seen += 1
            if node.module.startswith("ascend_parallel"):
                known = dir(importlib.import_module(node.module))
            else:
                of_example = ROOT / "examples" in page.parents
                places = [page.parent] if of_example else (ROOT / "examples").glob("*/")
                found = [path for place in places if (path := place / f"{node.module}.py").exists()]
                known = names_of(found[0]) if found else []
            names = [alias.name for alias in node.names]
            wrong += [f"{page.relative_to(ROOT)}: {node.module}: {name}" for name in names if name not in known]
    assert seen > 20
    assert wrong == []


def test_every_target_of_make_that_is_named_is_there():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE)) | {"compat"}
    named = {}
    for path in [*pages(), ROOT / ".ci" / "run", *WORKFLOWS.glob("*.yml")]:
        pattern = r"(?:^|`|run: )make (?=[a-z])([\w-]+)(?!\w)"
        named |= dict.fromkeys(re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE), path)
    assert len(named) > 8
    missing = {name for name in named if name not in targets and not name.startswith("compat-")}
    assert missing == set()


def test_ci_runs_the_same_command_on_every_python_and_other_torches():
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]
    assert jobs["run"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert [step["run"] for step in jobs["run"]["steps"] if "run" in step] == [".ci/run"]
    torches = [entry["torch"] for entry in jobs["torch"]["strategy"]["matrix"]["include"]]
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert min(torches, key=lambda one: [int(part) for part in one.split(".")]) == "2.7.1"
    assert len(torches) > 2
    assert pinned not in torches
    (asked,) = [step["run"] for step in jobs["torch"]["steps"] if "make test" in step.get("run", "")]
    files = re.findall(r"tests/[\w/.]+", asked)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_ci_ends_with_the_line_of_pytest():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert {"make lint", "make docs", "make test"} <= set(commands)
    assert commands[-1].startswith("make test")


@pytest.mark.parametrize("name", ["bug.yml", "slow.yml", "wish.yml"])
def test_an_issue_form_asks_for_what_it_names_once(name):
    form = yaml.safe_load((FORMS / name).read_text())
    assert form["name"]
    assert form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked) > 0
    assert all(part["attributes"]["label"] for part in asked)
    pages_named = re.findall(r"/blob/main/([\w/.-]+)", (FORMS / name).read_text())
    assert [page for page in pages_named if not (ROOT / page).exists()] == []


def test_a_run_whose_time_is_over_starts_no_test_and_lists_what_it_left_out():
    """CI gives its slow tests what is left of 70 minutes."""
    command = [sys.executable, "-m", "pytest", "tests/docs/test_constraints.py", "--until", "1", "--order", "a commit"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"(\d+) tests were not run: .* +\1 tests/docs/test_constraints.py", ended.stdout, re.DOTALL)
    assert " passed" not in ended.stdout


def test_no_two_files_of_tests_have_one_name():
    """The ranks of a test import its file by its name; another file of that name would be what a third one imports."""
    own_processes = {"ascend", "vllm"}
    files = [path for path in (ROOT / "tests").glob("*/test_*.py") if path.parent.name not in own_processes]
    count = Counter(path.name for path in files)
    assert len(count) > 100
    assert [str(path.relative_to(ROOT)) for path in files if count[path.name] > 1] == []
