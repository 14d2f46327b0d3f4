"""Write the tests of each promise into docs/promises.md: python docs/promises.py.

A row of the page has a name, ``<a id="name"></a>``. A test that holds the promise is marked ``@promise("name")``
(tests/support/marks.py), or its file is: ``pytestmark = promise("name")``. The marks are read from the code of the
tests, which is not run. The first two columns are written by hand; this script writes the third.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
TESTS = ROOT / "tests"
ROW = re.compile(r'^\| <a id="(?P<name>[\w-]+)"></a>(?P<text>.*?)(?<!\\)\|(?P<conditions>.*?)(?<!\\)\|.*$')


def names_of(mark: ast.expr) -> Iterator[str]:
    """Yield the promises that a decorator, or an entry of `pytestmark`, names."""
    if isinstance(mark, (ast.List, ast.Tuple)):
        for entry in mark.elts:
            yield from names_of(entry)
    elif isinstance(mark, ast.Call) and ast.unparse(mark.func) in ("promise", "pytest.mark.promise"):
        yield from (ast.literal_eval(argument) for argument in mark.args)


def promises_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each promise that a test file holds, and what holds it: the file, or one of its tests."""
    path = file.relative_to(TESTS).as_posix()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            yield from ((name, path) for name in names_of(statement.value))
        elif isinstance(statement, ast.FunctionDef):
            for decorator in statement.decorator_list:
                yield from ((name, f"{path}::{statement.name}") for name in names_of(decorator))


def tests_by_promise() -> dict[str, list[str]]:
    """Return, by promise, the tests that hold it, in the order of files and lines."""
    found = defaultdict(list)
    for file in sorted(TESTS.rglob("test_*.py")):
        for name, test in promises_of(file):
            found[name].append(test)
    return dict(found)


def page(text: str, tests: dict[str, list[str]]) -> str:
    """Return the page with the tests of each row.

    Raises ValueError for a row without a test, two rows of one name, and a mark without a row.
    """
    lines, rows = [], set()
    for line in text.splitlines():
        row = ROW.match(line)
        if row is None:
            lines.append(line)
            continue
        name = row["name"]
        if name in rows:
            raise ValueError(f"docs/promises.md: two rows are named {name!r}")
        if name not in tests:
            raise ValueError(f"docs/promises.md: no test is marked promise({name!r})")
        rows.add(name)
        held = ", ".join(f"`{test}`" for test in tests[name])
        lines.append(f'| <a id="{name}"></a>{row["text"]}|{row["conditions"]}| {held} |')
    if unknown := sorted(tests.keys() - rows):
        where = ", ".join(f"promise({name!r}) in {tests[name][0]}" for name in unknown)
        raise ValueError(f"docs/promises.md has no row for {where}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tests_by_promise()), encoding="utf-8")
