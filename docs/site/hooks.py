"""MkDocs' hooks: pages outside of docs/, links that are right on the site as in the tree, a search for Chinese words.

Chinese has no spaces between words, so the search's index cuts the text before every word of the vocabulary.

A link in a page is relative to the page's place in the repository, as on GitHub. On the site a link to a page of the
site leads to that page, and one to another file of the tree to the repository. A link to what is not there is a
warning, which ends a strict build, as one to a heading that is not there does (MkDocs' own check).
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("mkdocs.hooks.links")
# The pages outside of docs/, by their place in the tree, with their place on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    **{
        name: name
        for name in (
            "CHANGELOG.md",
            "CODE_OF_CONDUCT.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "benchmarks/README.md",
            *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "examples").rglob("README*.md"))),
        )
    },
}
PLACES = {page: name for name, page in ELSEWHERE.items()}
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
HAN = r"[\u4e00-\u9fff]"
# What lies between the words of a search, beside spaces and dashes: punctuation and particles of Chinese.
PARTICLES = "的在与和或把被由从则各每该是为对将及等了"
GAPS = rf"\s\-\u200b\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\u2018-\u201d\u2026{PARTICLES}"
CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


@event_priority(100)
def on_config(config: Any) -> Any:
    """Replace a folder in the navigation, such as decisions/, by its pages, index.md first; set the search's words."""
    config.nav = _with_folders(config.nav)
    config.plugins["material/search"].config.separator = separator()
    return config


def separator() -> str:
    """Return the expression, the same in Python and JavaScript, at which the search cuts a text into words.

    A search finds words by how they begin. So every word of the vocabulary's second column begins a word wherever it
    stands, but for one sign behind the beginning of another, as in 序列并行. Other Chinese words begin behind gaps. A
    sign that would stand alone is left out: the search shortens a query to such a sign if it begins with it.
    """
    chinese = (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8").partition("## Chinese")[2]
    column = " ".join(re.findall(r"^\|[^|]*\|([^|]*)\|", chinese, re.MULTILINE))
    words = sorted(set(re.findall(f"{HAN}{HAN}+", column)))
    starts = "|".join("".join(f"(?<!{one[0]})" for one in words if one.find(word) == 1) + word for word in words)
    alone = f"(?:(?<!{HAN})|(?<=[{PARTICLES}])){HAN}(?=(?!{HAN})|[{PARTICLES}]|{starts})"
    return f"(?={starts})|(?:[{GAPS}]|{alone})+"


def _with_folders(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_with_folders(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _with_folders(entry) for title, entry in nav.items()}
    if not nav.endswith("/"):
        return nav
    names = sorted(
        (path.name for path in (ROOT / "docs" / nav).glob("*.md")), key=lambda name: (name != "index.md", name)
    )
    return [nav + name for name in names]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/, and the site's own script and style."""
    for name, page in ELSEWHERE.items():
        added = File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        added.edit_uri = f"../{name}"
        files.append(added)
    for name in ("iframe-worker.js", "site.css"):
        content = (ROOT / "docs" / "site" / name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"assets/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page's text with the links of the site, outside of its blocks of code."""
    place = PLACES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(found: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(posixpath.dirname(place), found[1]))
        return f"]({_target(name, place, page.file.src_uri, config, files)}{found[2] or ''})"

    parts = CODE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))


def _target(name: str, place: str, page: str, config: Any, files: Files) -> str:
    """Return the link from `page` to the file `name` of the tree; `place` is the page's file there."""
    on_site = ELSEWHERE.get(name, name.removeprefix("docs/") if name.startswith("docs/") else "")
    found = files.get_file_from_path(on_site)
    if found is not None and found.inclusion.is_included():
        return posixpath.relpath(on_site, posixpath.dirname(page) or ".")
    if not (ROOT / name).exists():
        LOG.warning("%s has a link to %s, which is not there", place, name)
    kind = "tree" if (ROOT / name).is_dir() else "blob"
    return f"{config.repo_url.rstrip('/')}/{kind}/main/{name}"
