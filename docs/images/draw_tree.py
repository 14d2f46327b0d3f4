"""Draws tree.svg: how 8 blocks are summed at degree 1, 2 and 4 (docs/deterministic.md). Run it after a change.

python docs/images/draw_tree.py
"""

from __future__ import annotations

from pathlib import Path

from ascend_parallel.ops.blocks import BLOCKS

DEGREES = (1, 2, 4)
STEP, LEFT, TOP, LEVEL, PANEL = 84, 150, 46, 50, 268
COLOURS = ("#2f6fab", "#2e7d4f", "#b35900", "#8250df")
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #1f2328; text-anchor: middle }
  .title { font-weight: bold; text-anchor: start }
  .inside { fill: #ffffff }
  .edge { stroke: #8c959f; stroke-width: 1.5 }
  .between { stroke: #cf222e; stroke-width: 2.5; stroke-dasharray: 6 3 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #e6edf3 }
  }
"""


def main() -> None:
    """Write the picture beside this file."""
    width, height = LEFT + STEP * BLOCKS + 10, PANEL * len(DEGREES) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
    ]
    for place, degree in enumerate(DEGREES):
        lines += _panel(degree, TOP + PANEL * place)
    text = "\n".join([*lines, "</svg>", ""])
    (Path(__file__).parent / "tree.svg").write_text(text, encoding="utf-8")


def _panel(degree: int, top: int) -> list[str]:
    """Return the tree of one degree: a node has its rank's colour, and dashed edges go from rank to rank."""
    ranks = "one rank" if degree == 1 else f"{degree} ranks"
    edges, nodes = [], [f'<text class="title" x="16" y="{top + 4}">{ranks}</text>']
    levels = BLOCKS.bit_length()
    for level in range(levels):
        count, y = BLOCKS >> level, top + LEVEL * (levels - 1 - level)
        for index in range(count):
            x = _x(level, index)
            first, last = (index << level) * degree // BLOCKS, (((index + 1) << level) - 1) * degree // BLOCKS
            if level:
                for child in (2 * index, 2 * index + 1):
                    kind = "edge" if first == last else "between"
                    end = f'x2="{_x(level - 1, child)}" y2="{y + LEVEL}"'
                    edges.append(f'<line class="{kind}" x1="{x}" y1="{y}" {end}/>')
            colour = COLOURS[first] if first == last else "#59636e"
            label = f"x{index} w{index}" if level == 0 else "+"
            half = 32 if level == 0 else 14
            nodes.append(f'<rect x="{x - half}" y="{y - 13}" width="{2 * half}" height="26" rx="6" fill="{colour}"/>')
            nodes.append(f'<text class="inside" x="{x}" y="{y + 5}">{label}</text>')
    return [*edges, *nodes]


def _x(level: int, index: int) -> float:
    return LEFT + STEP * ((index + 0.5) * (1 << level) - 0.5)


if __name__ == "__main__":
    main()
