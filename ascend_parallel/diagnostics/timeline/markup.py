"""HTML and SVG by template: every value that is put in is escaped, unless a template made it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from string import Template


class Markup(str):
    """Text that is HTML or SVG already: made by `fill` or `joined`, or a constant of this package."""


def fill(template: str, **values: object) -> Markup:
    """Return the template with each ``$name`` replaced by its value, escaped unless it is `Markup`."""
    safe = {name: value if isinstance(value, Markup) else escape(str(value)) for name, value in values.items()}
    return Markup(Template(template).substitute(safe))


def joined(parts: Iterable[Markup], between: str = "") -> Markup:
    """Return all parts one after the other."""
    return Markup(between.join(parts))
