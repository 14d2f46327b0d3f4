"""Count the distributed lines of the two programs: those that the program for one card does not have.

    python examples/strategy/count_lines.py

A line counts if it has code: blank lines, comments and docstrings do not count, closing brackets do. A line of gpt.py
does not count, as often as gpt.py has it. All files are formatted alike (ruff, 120 columns). A strategy's TOML file
counts as code.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ONE_CARD = "gpt.py"
PROGRAMS = {
    "plain torch.distributed": ("by_hand.py",),
    "annotations": ("annotated.py", "gpt.toml"),
}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> list[str]:
    """Return the lines with code, without spaces around them."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if path.suffix != ".py":
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return [lines[number - 1].strip() for number in sorted(code - docstring_lines(text))]


def docstring_lines(text: str) -> set[int]:
    """Return the numbers of the lines of docstrings, from 1."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def distributed_lines(files: tuple[str, ...]) -> list[str]:
    """Return a program's lines with code that the program for one card does not have."""
    spare = Counter(code_lines(HERE / ONE_CARD))
    found = []
    for line in (line for file in files for line in code_lines(HERE / file)):
        if spare[line]:
            spare[line] -= 1
        else:
            found.append(line)
    return found


def table() -> str:
    """Return the comparison as a table."""
    rows = ["| written with | files | lines | of these distributed |", "|---|---|---|---|"]
    for name, files in {"one card": (ONE_CARD,), **PROGRAMS}.items():
        lines = sum(len(code_lines(HERE / file)) for file in files)
        rows.append(f"| {name} | {', '.join(files)} | {lines} | {len(distributed_lines(files))} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
