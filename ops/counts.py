"""Counts of each operator's calls, chunks and collectives. They are for display; no decision reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class OperatorCount:
    """Totals of one operator in this process."""

    calls: int = 0
    chunks: int = 0
    collectives: int = 0


class Counts:
    """Totals of all operators in this process."""

    def __init__(self) -> None:
        """Start from zero."""
        self._by_operator: dict[str, OperatorCount] = {}

    def add(self, operator: str, chunks: int, collectives: int) -> None:
        """Count one call."""
        count = self._by_operator.setdefault(operator, OperatorCount())
        count.calls += 1
        count.chunks += chunks
        count.collectives += collectives

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the totals by operator name."""
        return {operator: asdict(count) for operator, count in self._by_operator.items()}

    def restore(self, totals: dict[str, dict[str, int]]) -> None:
        """Restore totals that `as_dict` returned."""
        self._by_operator = {operator: OperatorCount(**count) for operator, count in totals.items()}

    def clear(self) -> None:
        """Reset all totals to zero."""
        self._by_operator.clear()


COUNTS = Counts()
