"""Counts of each operator's calls, chunks and collectives. They are for display; no decision reads them."""

from __future__ import annotations


class Counts:
    """Totals of all operators in this process."""

    def __init__(self) -> None:
        """Start from zero."""
        self._totals: dict[str, dict[str, int]] = {}

    def add(self, operator: str, chunks: int, collectives: int) -> None:
        """Count one call."""
        totals = self._totals.setdefault(operator, {"calls": 0, "chunks": 0, "collectives": 0})
        totals["calls"] += 1
        totals["chunks"] += chunks
        totals["collectives"] += collectives

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the totals by operator name."""
        return {operator: dict(totals) for operator, totals in self._totals.items()}

    def restore(self, totals: dict[str, dict[str, int]]) -> None:
        """Restore totals that `as_dict` returned."""
        self._totals = {operator: dict(of_operator) for operator, of_operator in totals.items()}

    def clear(self) -> None:
        """Reset all totals to zero."""
        self._totals.clear()


COUNTS = Counts()
