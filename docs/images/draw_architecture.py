"""Write the table of rooms and the picture of their imports: python docs/images/draw_architecture.py.

Both are read from the code: rooms and their order from the contracts of import-linter in pyproject.toml, imports
(for types and inside functions too) by grimp, sentences from docstrings.
"""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

import grimp
import networkx as nx
import tomllib

from ascend_parallel.sharding.visualize.graph_drawing import draw

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
BEGIN, END = "<!-- rooms: written by docs/images/draw_architecture.py -->", "<!-- end of rooms -->"
PACKAGE = "ascend_parallel"
STYLE = """
  .room rect { fill: #ffffff; stroke: #57606a; rx: 5 }
  text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328; text-anchor: middle }
  path { fill: none; stroke: #8c959f; stroke-width: 1.2; marker-end: url(#head) }
  @media (prefers-color-scheme: dark) {
    .room rect { fill: #0d1117; stroke: #8b949e }
    text { fill: #e6edf3 }
    path { stroke: #59636e }
  }
"""


def rooms() -> list[str]:
    """Return the rooms, uppermost first, as the first contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [room.strip() for layer in contracts[0]["layers"] for room in layer.split("|")]


def imports(names: list[str]) -> dict[str, list[str]]:
    """Return, by room, the rooms that it imports."""
    graph = grimp.build_graph(PACKAGE)

    def room_of(module: str) -> str | None:
        return next((name for name in names if module == name or module.startswith(f"{name}.")), None)

    found: dict[str, set[str]] = {name: set() for name in names}
    for module in graph.modules:
        here = room_of(module)
        for imported in graph.find_modules_directly_imported_by(module):
            there = room_of(imported)
            if here and there and here != there:
                found[here].add(there)
    return {name: [other for other in names if other in found[name]] for name in names}


def files_of(room: str) -> list[Path]:
    """Return a room's files, its own first."""
    parts = room.split(".")[1:]
    base = ROOT / PACKAGE if parts[0] not in ("ops", "patches") else ROOT
    place = base.joinpath(*parts)
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def sentence(file: Path) -> str:
    """Return the first line of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].replace("|", "\\|") if text else ""


def table() -> str:
    """Return the table of rooms, uppermost first, with a row for each folder in a room."""
    names = rooms()
    found = imports(names)
    rows = ["| room | what it answers | files | imports |", "|---|---|---|---|"]
    for name in names:
        files = files_of(name)
        below = ", ".join(short(other) for other in found[name]) or "none"
        rows.append(f"| **`{short(name)}`** | {sentence(files[0])} | {len(files)} | {below} |")
        for folder in sorted({file.parent for file in files} - {files[0].parent}):
            inner = folder / "__init__.py"
            label = short(name) + folder.as_posix().removeprefix(files[0].parent.as_posix())
            rows.append(f"| `{label}` | {sentence(inner)} | {len(list(folder.glob('*.py')))} | |")
    return "\n".join(rows)


def short(room: str) -> str:
    """Return a room's name without the package's."""
    return room.removeprefix(f"{PACKAGE}.").replace(".", "/")


def picture() -> str:
    """Return the rooms and their imports as SVG: every arrow points down. An import that others imply is left out."""
    names = rooms()
    graph = nx.DiGraph(imports(names))
    needed = nx.transitive_reduction(graph).edges  # in another order at every call
    arrows = [arrow for arrow in graph.edges if arrow in needed]
    drawing = draw({name: (9.0 * len(short(name)) + 24, 30.0) for name in names}, arrows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {drawing.width + 16:g} {drawing.height + 16:g}" '
        f'role="img">\n<title>Rooms of {PACKAGE} and their imports</title>\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" style="fill: #8c959f; stroke: none"/></marker></defs>'
    ]
    for points in drawing.arrows.values():
        line = " ".join(f"{x:g} {y:g}" for x, y in points)
        parts.append(f'<path d="M{line}"/>')
    for name, place in drawing.places.items():
        parts.append(
            f'<g class="room"><rect x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" height="{place.height:g}"/>'
            f'<text x="{place.x + place.width / 2:g}" y="{place.y + 20:g}">{escape(short(name))}</text></g>'
        )
    return "\n".join((*parts, "</svg>\n"))


def page(text: str) -> str:
    """Return the page with the table of today."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
