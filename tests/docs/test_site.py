"""The documentation as a site: `make docs` fails for what is missing, and the API pages have every public name."""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import browse, chromium, probe_of

from ascend_parallel import timeline

ROOT = Path(__file__).parents[2]
ROOMS = {
    "index": "ascend_parallel",
    "ops": "ascend_parallel.ops",
    "sharding": "ascend_parallel.sharding",
    "training": "ascend_parallel.training",
}
# What the pages name in a sentence, because it stands elsewhere: torch's placements, and names that two rooms share.
ELSEWHERE = {
    *(f"ascend_parallel.sharding.{name}" for name in ("Partial", "Replicate", "Shard")),
    *(f"ascend_parallel.ops.{name}" for name in ("CollectiveError", "DegreeError", "Explanation", "Matmul")),
    "ascend_parallel.ops.UnmetRequestError",
    "ascend_parallel.training.TensorShard",
    "ascend_parallel.ops",
    "ascend_parallel.timeline",
}
NEEDS_MKDOCS = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs and mkdocstrings are not installed",
)

NEEDS_CHROMIUM = pytest.mark.skipif(chromium() is None, reason="no chromium: install one, or name it in CHROMIUM")


def page_of_api(name):
    return (ROOT / "docs" / "api" / f"{name}.md").read_text()


def public(module):
    return {f"{module}.{name}" for name in importlib.import_module(module).__all__}


def directives(name):
    return re.findall(r"^::: (\S+)$", page_of_api(name), re.MULTILINE)


@pytest.mark.parametrize("name", ROOMS)
def test_the_api_pages_have_every_public_name(name):
    missing = public(ROOMS[name]) - set(directives(name)) - ELSEWHERE
    assert missing == set()
    for elsewhere in public(ROOMS[name]) & ELSEWHERE:
        assert elsewhere.rpartition(".")[2] in page_of_api(name)


def test_the_api_pages_have_every_name_of_checkpoints_and_timelines_and_none_twice():
    listed = [entry for name in ROOMS for entry in directives(name)]
    assert public("ascend_parallel.training.checkpoint") <= set(listed)
    assert {f"ascend_parallel.timeline.{name}" for name in timeline.__all__} <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tracked files, whose pages may be changed."""
    folder = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(tree, *added):
    """Run ``make docs`` in the tree, each text of `added` put at its page's end, in the environment that there is."""
    before = {page: (tree / page).read_text() for page, _ in added}
    for page, text in added:
        (tree / page).write_text(f"{(tree / page).read_text()}\n{text}\n")
    try:
        command = ["make", "--old-file", f"{sys.prefix}/ready", f"VENV={sys.prefix}", "docs"]
        return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=200, check=False)
    finally:
        for page, text in before.items():
            (tree / page).write_text(text)


@pytest.fixture(scope="module")
def site(tree, tmp_path_factory):
    """The built site."""
    ended = build(tree)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Path(shutil.move(tree / "build" / "site", tmp_path_factory.mktemp("site")))


@pytest.mark.slow
@NEEDS_MKDOCS
def test_the_site_is_built_strictly_with_all_names(site):
    for name, module in ROOMS.items():
        shown = (site / "api" / f"{name}.html").read_text()
        assert {entry for entry in public(module) - ELSEWHERE if f'id="{entry}"' not in shown} == set()
    start = (site / "index.html").read_text()
    assert 'href="quickstart.html"' in start
    assert 'src="docs/images' not in start
    assert "matmul_reduce_scatter" in (site / "search" / "search_index.json").read_text()


@pytest.mark.slow
@NEEDS_MKDOCS
def test_the_walks_stand_under_start_and_no_page_asks_another_host(site):
    start = (site / "index.html").read_text()
    for walk in sorted(ROOT.glob("examples/for_*/README*.md")):
        name = str(walk.relative_to(ROOT)).replace("README.md", "index.html").replace(".md", ".html")
        assert f'href="{name}"' in start
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert len(pages) > 50
    assert [
        src for page in pages for src in re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(http[^"]*)"', page)
    ] == []


@pytest.mark.slow
@NEEDS_MKDOCS
@NEEDS_CHROMIUM
def test_the_search_works_in_files_without_a_server(site, tmp_path):
    """In a browser that opens file://, English and Chinese; without the site's own script there is no result."""
    patient = ("--virtual-time-budget=20000", "--dump-dom")
    for query in ("reduce-scatter", "\u91cd\u8ba1\u7b97"):
        shown = browse(f"{(site / 'index.html').as_uri()}?q={query}", *patient, folder=tmp_path)
        assert len(re.findall('class="md-search-result__item"', shown)) > 3, query
    start = (site / "index.html").read_text()
    (site / "bare.html").write_text(start.replace('<script src="assets/iframe-worker.js"></script>', ""))
    shown = browse(f"{(site / 'bare.html').as_uri()}?q=overlap", *patient, folder=tmp_path)
    assert "md-search-result__item" not in shown


# Of every block of code: how far it sticks out, and on how many lines it is shown beside those that it has.
BLOCKS = """<script>addEventListener('load', () => {
  const found = [...document.querySelectorAll('pre > code')].map(code => {
    const style = getComputedStyle(code), text = code.textContent.replace(/\\n$/, '');
    const height = code.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
    const columns = Math.max(...text.split('\\n').map(line => line.length));
    return {text, columns, wide: code.scrollWidth - code.clientWidth,
            more: Math.round(height / parseFloat(style.lineHeight)) - text.split('\\n').length};
  });
  const note = document.createElement('pre');
  note.id = 'probe'; note.textContent = JSON.stringify({width: innerWidth, found});
  document.body.append(note);
})</script>"""


@pytest.mark.slow
@NEEDS_MKDOCS
@NEEDS_CHROMIUM
def test_blocks_of_code_are_whole_on_a_window_of_1366_pixels(site, tmp_path):
    """The blocks of all pages, in one page of the site: nothing is cut, and 120 columns stay on one line."""
    pages = [page.read_text() for page in sorted(site.rglob("*.html"))]
    blocks = [
        block for page in pages for block in re.findall(r'<div class="[^"]*highlight">.*?</pre></div>', page, re.DOTALL)
    ]
    start = (site / "index.html").read_text()
    article = re.search(r"<article[^>]*>(.*)</article>", start, re.DOTALL)[1]
    (site / "blocks.html").write_text(start.replace(article, "".join(blocks)) + BLOCKS)
    told = probe_of(browse((site / "blocks.html").as_uri(), "--dump-dom", folder=tmp_path, width=1366))
    assert told["width"] == 1366 and len(told["found"]) == len(blocks) > 250
    assert [one for one in told["found"] if one["wide"] > 0] == []
    assert [one for one in told["found"] if one["more"] and one["columns"] <= 120] == []


GONE = {
    "docs/no-such-page.md": ("README.md", "[gone](docs/no-such-page.md)"),
    "no-such-page-either.md": ("docs/faq.md", "[gone](no-such-page-either.md)"),
    "no-such-heading": ("docs/faq.md", "[gone](settings.md#no-such-heading)"),
    "examples/no_such_script.py": ("docs/faq.md", "[gone](../examples/no_such_script.py)"),
    "no_such_operator": ("docs/api/ops.md", "[gone][ascend_parallel.ops.no_such_operator]"),
}


@pytest.mark.slow
@NEEDS_MKDOCS
def test_a_link_or_a_reference_to_what_is_not_there_fails(tree):
    """Each is counted: none is only remarked."""
    ended = build(tree, *GONE.values())
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert [name for name in GONE if name not in said] == []
    assert f"Aborted with {len(GONE)} warnings in strict mode" in said


@pytest.mark.slow
@NEEDS_MKDOCS
def test_a_name_that_is_not_there_fails(tree):
    ended = build(tree, ("docs/api/ops.md", "::: ascend_parallel.ops.no_such_operator"))
    assert ended.returncode != 0
    assert "no_such_operator" in ended.stdout + ended.stderr


def test_lists_in_docstrings_become_definition_lists():
    pytest.importorskip("griffe", reason="mkdocstrings is not installed")
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "site" / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    text = "Return y.\n\ngroup\n    None: the default\n    group.\nx\n    Rows.\n\nRaises `ValueError`.\n"
    expected = "Return y.\n\n\n`group`\n:   None: the default\n    group.\n\n`x`\n:   Rows.\n\nRaises `ValueError`.\n"
    assert docstrings.markdown(text) == expected
    table = "Rooms.\n\nlayout, mesh     placements\ngraph            a forward\n"
    assert docstrings.markdown(table).count("```") == 2
    assert docstrings.markdown("One line. And two words.\nAnother.\n") == "One line. And two words.\nAnother.\n"
