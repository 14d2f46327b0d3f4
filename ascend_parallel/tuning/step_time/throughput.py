"""What a step's seconds come to: tokens a second and card, and the share of the cards' peak that the model needs."""

from __future__ import annotations

from dataclasses import dataclass

# Products of a training step's matmul: its result, and the gradients of both operands.
PASSES = 3


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A step of `seconds` on so many cards.

    work
        The units of a step, such as tokens, of all replicas.
    macs
        The multiply-adds of a step's forwards, of all replicas: of matmuls and of attention's scores, without those
        that recompute repeats.
    peak
        Multiply-adds per second of a card.
    """

    seconds: float
    cards: int
    work: float
    macs: float
    peak: float
    unit: str = "tokens"

    @property
    def per_card(self) -> float:
        """Units per second and card."""
        return self.work / self.seconds / self.cards

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B): without recompute."""
        return PASSES * self.macs / (self.seconds * self.cards * self.peak)

    def as_dict(self) -> dict[str, float]:
        """Return plain values, for JSON."""
        return {"seconds": self.seconds, f"{self.unit}_per_second_per_card": self.per_card, "mfu": self.mfu}

    def __str__(self) -> str:
        """Return the rates in words."""
        return rates_in_words(self.per_card, self.unit, self.mfu)


def rates_in_words(per_card: float, unit: str, mfu: float) -> str:
    """Return units per second and card, and the MFU, in words."""
    digits = ".0f" if per_card >= 10 else ".3g"
    return f"{per_card:{digits}} {unit} per second and card, MFU {mfu:.1%}"
