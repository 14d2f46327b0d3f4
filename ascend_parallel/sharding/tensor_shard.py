"""A rank's part of a whole tensor, as a box in it: what optimizer parallel and checkpoints tell each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_parallel.sharding.layout import Shape


@dataclass(frozen=True)
class TensorShard:
    """A box of a whole tensor.

    local
        What this rank holds; its shape is the box's, and may have no elements.
    shape
        Of the whole tensor.
    offsets
        Where the box starts on each dimension.
    """

    local: torch.Tensor
    shape: Shape
    offsets: tuple[int, ...]
