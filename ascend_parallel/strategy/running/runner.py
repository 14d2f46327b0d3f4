"""What a training step needs of what runs forward and backward, and what all of those share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ascend_parallel.sharding.pieces import Piece
from ascend_parallel.strategy.optimizer.targets import Target
from ascend_parallel.strategy.planned import rows_of_part
from ascend_parallel.strategy.strategy import Strategy


class Runner(Protocol):
    """What a training step needs of it."""

    @property
    def unreduced(self) -> bool:
        """Whether the optimizer sums gradients over its replicas itself."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """This rank's part of the model."""

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> torch.Tensor:
        """Add the gradients of ``factor * loss``; return the loss. `last`: of the batches between two steps."""

    def finish(self) -> None:
        """Sum what has to be whole before the optimizer steps."""

    def clear(self) -> None:
        """Drop all gradients."""

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's part of parameters and buffers."""


def part_of(one: Any, number: int, count: int) -> Any:
    """Return the `number`-th of `count` micro-batches of a batch's tensor."""
    if not isinstance(one, torch.Tensor) or count == 1:
        return one
    rows = rows_of_part(one, count)
    return one[number * rows : (number + 1) * rows]


def divided_over(strategy: Strategy) -> str | None:
    """Return the mesh dimension whose ranks share the optimizer's work; None if nobody does."""
    return strategy.sharding.dim if strategy.sharding.level else None
