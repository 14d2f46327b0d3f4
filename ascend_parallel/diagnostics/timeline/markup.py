"""Make HTML and SVG from templates; every value is escaped unless it is `Markup`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from string import Template


class Markup(str):
    """Text that is HTML or SVG: a result of `fill` or `joined`, or a constant of this package."""


def fill(template: str, **values: object) -> Markup:
    """Return the template with each ``$name`` replaced by its value, escaped unless it is `Markup`."""
    safe = {name: value if isinstance(value, Markup) else escape(str(value)) for name, value in values.items()}
    return Markup(Template(template).substitute(safe))


def joined(parts: Iterable[Markup], between: str = "") -> Markup:
    """Return the parts joined with `between`."""
    return Markup(between.join(parts))
