"""Scale the loss for fp16 gradients as torch.amp.GradScaler does, with the same decision on all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(kw_only=True)
class LossScale:
    """A factor of the loss that keeps small gradients from vanishing in fp16.

    If gradients overflow on any rank, all ranks skip the step and multiply the scale by `backoff`. After `interval`
    steps without overflow the scale is multiplied by `growth`.

    good
        Steps since the scale last changed.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good: int = 0

    def __post_init__(self) -> None:
        """Check each number."""
        if not (isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale!r}: give a finite number above 0")
        if not self.growth >= 1:
            raise ValueError(f"growth={self.growth!r}: give 1 or more")
        if not 0 < self.backoff < 1:
            raise ValueError(f"backoff={self.backoff!r}: give a number between 0 and 1")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ValueError(f"interval={self.interval!r}: give a whole number of 1 or more")

    def update(self, overflowed: bool) -> None:
        """Adjust the scale after a step."""
        self.good = 0 if overflowed else self.good + 1
        if overflowed:
            self.scale *= self.backoff
        elif self.good == self.interval:
            self.scale, self.good = self.scale * self.growth, 0

    def state_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all fields."""
        for name in asdict(self):
            setattr(self, name, state[name])
