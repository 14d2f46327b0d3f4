"""The bytes that a rank holds in a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank, by what they hold.

    activations
        The most that are kept from forward to backward at once, of all micro-batches in flight.
    buffers
        Of collectives, receives and the operator that runs; 0 where a prediction leaves them out.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return float(sum(vars(self).values()))

    def __add__(self, other: RankBytes) -> RankBytes:
        """Return the bytes of both."""
        return RankBytes(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def without_buffers(self) -> dict[str, float]:
        """Return the bytes by name, for predictions that leave buffers out."""
        return {name: size for name, size in vars(self).items() if name != "buffers"}
