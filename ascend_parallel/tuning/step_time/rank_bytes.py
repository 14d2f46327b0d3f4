"""The bytes that a rank holds in a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ascend_parallel.tuning.step_time.runtimes import WIDE

ZERO_STAGES = (0, 1, 2, 3)
# Adam's states of a parameter's size (`OptimizerFactory.states`), in the dtype of the master weights.
ADAM_STATES = 2
Count = TypeVar("Count", float, npt.NDArray[np.float64])


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


def zero_bytes(
    whole: Count, own: Count, zero_stage: int, element: tuple[Count | float, Count | float, Count | float]
) -> tuple[Count, ...]:
    """Return the bytes of parameters, gradients and optimizer state of a rank.

    whole, own
        Elements of the parameters before, and of the rank's shards after they are partitioned over replicas.
    element
        The bytes of an element of each of the three.
    """
    parameter, gradient, optimizer = element
    kept, summed = own if zero_stage == 3 else whole, own if zero_stage >= 2 else whole
    return kept * parameter, summed * gradient, own * optimizer


def gradient_bytes(itemsize: int, zero_stage: int, *, wide: bool) -> int:
    """Return the bytes of a gradient's element of parameters of `itemsize` bytes.

    wide: backwards that add up 16 bits do so in fp32. So do the ranks' sums at ZeRO 2.
    """
    return WIDE if (wide or zero_stage == 2) and itemsize < WIDE else itemsize


def optimizer_bytes(itemsize: Count, master_itemsize: Count | None, states: int = ADAM_STATES) -> Count:
    """Return the optimizer's bytes for an element of a parameter: its states, and the master weight."""
    if master_itemsize is None:
        return states * itemsize
    return (states + 1) * master_itemsize
