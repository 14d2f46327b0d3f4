"""Turns this package's docstrings into Markdown for the API pages: its lists of names become definition lists.

In the source a name stands on a line, and what it is below it, indented; or both stand on one line, with two blanks or
more between. Markdown would make running text of both.
"""

import re
from typing import Any

import griffe

NAME = re.compile(r"^(?P<name>\S.*)\n(?P<text>(?:    .*(?:\n|$))+)", re.MULTILINE)
TABLE = re.compile(r"(?:^[^\s`|]\S*(?:,? \S+)*? {2,}\S.*(?:\n {2,}\S.*)*(?:\n|$)){2,}", re.MULTILINE)


def markdown(text: str) -> str:
    """Return a docstring with its lists as Markdown."""
    text = TABLE.sub(lambda found: "\n```text\n" + found[0].rstrip("\n") + "\n```\n", text)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else NAME.sub(_definition, part) for index, part in enumerate(parts))


def _definition(found: re.Match[str]) -> str:
    first, *others = found["text"].rstrip("\n").split("\n")
    return "\n".join([f"\n`{found['name'].strip('`')}`", f":   {first.strip()}", *others]) + "\n"


class Docstrings(griffe.Extension):
    """Applies `markdown` to every docstring that the pages show."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
