"""The Chinese pages: in step with the English ones, in the words of the vocabulary, and found by the site's search."""

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import promise

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md"), *ROOT.glob("examples/*/*.zh.md")]
)
HAN = "[\u4e00-\u9fff]"
NEWCOMERS = ("quickstart", "tutorial", "strategy", "mindspeed", "frameworks", "faq", "troubleshooting")
# The pages whose code keeps its English comments: a test runs the tutorial's as it stands.
SAME_CODE = ("docs/tutorial.zh.md", "docs/strategy.zh.md")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def english(page):
    return page.replace(".zh.md", ".md")


def blocks(text):
    return re.findall(r"^ *```.*?^ *```", text, re.MULTILINE | re.DOTALL)


def prose(text):
    """The text without its blocks of code and without the targets of links; each line stays where it is."""
    text = re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def shape(text):
    """What a translation leaves as it is: levels of headings, languages of blocks, rows of tables, points, pictures."""
    marks = re.findall(r"^(#+ |\| |[-*] |\d+\. )", prose(text), re.MULTILINE)
    return marks, [block.split("\n")[0] for block in blocks(text)], re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)


def figures(text):
    return set(re.findall(r"\d+(?:[.,]\d+)*", prose(text)))


def names(text):
    """The code inside of sentences: options, functions, files, messages."""
    return set(re.findall(r"`([^`\n]+)`", prose(text)))


def targets(text):
    """The pages that a text leads to; a Chinese one counts as the English one."""
    return {target.partition("#")[0].replace(".zh.md", ".md") for target in re.findall(r"\]\(([^)\s]+)\)", text)}


def code(line):
    """A line of code without what is translated: a comment, a docstring, a remark in brackets, a name to fill in."""
    return re.sub(r"#.*|\"\"\".*\"\"\"|^[(\uff08].*[)\uff09]$|<[^>]*>", "", line).rstrip()


def test_the_pages_that_a_newcomer_reads_are_there_in_chinese():
    assert {"README.zh.md", *(f"docs/{page}.zh.md" for page in NEWCOMERS)} <= set(PAGES)


@promise("chinese-pages")
@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_is_in_step_with_the_english_one(page):
    """The same headings, tables, lists, pictures, figures, names, links, and code but for its comments."""
    here, there = read(page), read(english(page))
    assert shape(here) == shape(there)
    assert figures(here) == figures(there)
    assert names(there) - names(here) == set()
    assert targets(here) == targets(there)
    ours, theirs = (
        [list(filter(None, map(code, block.splitlines()))) for block in blocks(text)] for text in (here, there)
    )
    assert ours == theirs
    if page in SAME_CODE:
        assert blocks(here) == blocks(there)


@pytest.mark.parametrize(
    ("of", "text", "drifted"),
    [
        (shape, "# A\n\n| a |\n|---|\n| b |\n", "# A\n\n| a |\n|---|\n"),
        (shape, "# A\n\n- b\n- c\n", "# A\n\n- b\n"),
        (shape, "# A\n\n## B\n", "# A\n"),
        (figures, "1.19 of 2 ranks", "1.2 of 2 ranks"),
        (names, "set `COC_TUNE`", "set a variable"),
        (targets, "see [b](b.md#c)", "see b"),
    ],
)
def test_a_drift_is_seen(of, text, drifted):
    assert of(text) != of(drifted)


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_leads_to_chinese_pages(page):
    links = re.findall(r"(?<!English: )\[[^]]*\]\(([^)\s]+)\)", read(page))
    known = [name for name in (link.partition("#")[0] for link in links) if re.search(r"(?<!\.zh)\.md$", name)]
    translated = [name for name in known if (ROOT / page).parent.joinpath(name[:-3] + ".zh.md").exists()]
    assert translated == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_and_its_translation_lead_to_each_other(page):
    assert f"]({Path(page).name})" in read(english(page))
    assert f"English: [{Path(english(page)).name}]({Path(english(page)).name})" in read(page)


def messages_of(page):
    """The first cells of the tables that quote messages."""
    return [line.split(" | ")[0] for line in read(page).splitlines() if re.match(r"\| [^|]*[`\"]", line)]


def test_the_chinese_troubleshooting_has_every_message():
    assert messages_of("docs/troubleshooting.zh.md") == messages_of("docs/troubleshooting.md")


def glossary():
    """Columns two and three of the vocabulary's Chinese table: the words that are written, and those that are not."""
    rows = re.findall(r"^\| (.*) \|$", read("docs/vocabulary.md").partition("## Chinese")[2], re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows[1:]]
    written, avoided = ({word for row in cells for word in row[column].split("、") if word} for column in (1, 2))
    return written, avoided


def slips(text):
    """The words of the third column that a text has, outside of code and of words of the second."""
    written, avoided = glossary()
    text = re.sub(r"`[^`\n]*`", "``", prose(text).partition("\n## 中文\n")[0])  # the vocabulary's own table
    found = []
    for word in sorted(avoided):
        allowed = "|".join(sorted((one for one in written if word in one), reverse=True))
        rest = re.sub(allowed, "", text) if allowed else text
        found += [(word, line.strip()) for line in rest.splitlines() if word in line]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_has_the_words_of_the_vocabulary(page):
    assert slips(read(page)) == []


@pytest.mark.parametrize("text", ["Matmul 与集合通信", "每个进程组", "用 8 卡训练", "在显存中", "一种 shape"])
def test_a_slip_is_found(text):
    assert slips(text)
    assert slips(f"`{text}` 单卡与通信域") == []


@pytest.fixture(scope="module")
def hooks():
    """The site's hooks."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def words_of_search():
    return sorted(word for word in glossary()[0] if re.fullmatch(f"{HAN}{HAN}+", word))


def cut(text, separator):
    """The places where words of a text begin, found as the search's splitter does: an empty match moves on by one."""
    pattern, begins, start, place = re.compile(separator), [], 0, 0
    while found := pattern.search(text, place):
        if start < found.start():
            begins.append(start)
        start, place = found.end(), found.end() if found[0] else found.start() + 1
        if place > len(text):
            break
    return {*begins, start}


@functools.cache
def signs_before(word):
    """The first signs of words that go on with this one, as 序 before 列并行."""
    return {one[0] for one in words_of_search() if one.find(word) == 1}


def places(word, text):
    """Where the word stands in the text, but for those behind one sign of a longer word."""
    before = signs_before(word)
    return {one.start() for one in re.finditer(word, text) if text[one.start() - 1 : one.start()] not in before}


def test_the_search_begins_a_word_at_every_word_of_the_vocabulary(hooks):
    separator = hooks.separator()
    for page in PAGES:
        for paragraph in read(page).splitlines():
            begins = cut(paragraph, separator)
            missed = [word for word in words_of_search() if not places(word, paragraph) <= begins]
            assert missed == [], (page, paragraph)
    assert not places("重计算", "每层的重计算") <= cut("每层的重计算", r"[\s\-]+")


@promise("chinese-pages")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node, which runs the site's search, is not installed")
def test_the_site_finds_a_chinese_word_in_every_section_that_has_it(hooks, tmp_path):
    """Of a built site, by the search worker that a reader's browser runs."""
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stderr
    sections = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    texts = {one["location"]: re.sub(r"<[^>]+>", "", f"{one['title']} {one['text']}") for one in sections}
    command = ["node", str(ROOT / "tests" / "support" / "site_search.mjs"), str(tmp_path)]
    asked = json.dumps(words_of_search())
    told = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(told.stdout)
    for word in words_of_search():
        has = {location for location, text in texts.items() if places(word, text)}
        assert has <= set(found[word]), word
    assert set(found["重计算"]) == {location for location, text in texts.items() if "重计算" in text}
    assert len(found["重计算"]) > 5
