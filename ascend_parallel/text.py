"""Whole numbers as users write them, in variables and on the command line, and values as errors show them."""

from __future__ import annotations

import re
import reprlib

BLANKS = " \t\r\n"
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200
_SHOWN.maxlong = 60
_SHOWN.maxdict = _SHOWN.maxlist = _SHOWN.maxtuple = 16


def whole(text: str) -> int | None:
    """Return the number that up to 18 ASCII digits say, or None for any other text.

    A sign before and blanks around are allowed. `int` takes digits of every script, underscores between
    them and numbers of any length, and strips other blanks than `str.strip` does.
    """
    plain = text.strip(BLANKS)
    return int(plain) if _WHOLE.fullmatch(plain) else None


def shown(value: object) -> str:
    """Return the value's repr, of which a long one is cut in the middle."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"<{type(value).__name__} of thousands of digits>"
