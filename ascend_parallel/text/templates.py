"""Fill the jinja2 templates of pages and pictures; a page extends the frame ``page.html.jinja`` of this folder."""

from __future__ import annotations

from pathlib import Path


def render(template: Path, **values: object) -> str:
    """Return the template with its values filled in; every value is escaped for HTML and SVG.

    Raises `jinja2.UndefinedError` where the template names a value that is not given.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # training imports this module, and draws nothing

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
