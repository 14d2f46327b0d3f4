"""The error of a layer or a sum whose bits would depend on the tensor-parallel degree, or on the rows of a call."""

from __future__ import annotations


class _Asked:
    """The setting that asked for those bits last in this process."""

    text = "COC_DETERMINISTIC=tp"


def name_in_errors(asked: str) -> None:
    """Have errors name the setting `asked`, with its value."""
    _Asked.text = asked


class DegreeError(ValueError):
    """COC_DETERMINISTIC=tp or invariant, and bits would depend on the degree or the rows; raised on every rank."""

    def __init__(self, text: str) -> None:
        """Keep the text, and the setting that asks for what is missing."""
        super().__init__(text)
        self._asked = _Asked.text

    def __str__(self) -> str:
        """Return what is missing, after the setting that asks for it."""
        return f"{self._asked}: {super().__str__()}"
