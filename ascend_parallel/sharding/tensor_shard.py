"""A rank's part of a whole tensor, as a box: the common format of the sharded optimizer and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_parallel.sharding.layout import Shape


@dataclass(frozen=True)
class TensorShard:
    """A box of a whole tensor.

    local
        This rank's tensor; it has the box's shape and may be empty.
    shape
        The shape of the whole tensor.
    offsets
        The start of the box on each dimension.
    """

    local: torch.Tensor
    shape: Shape
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> TensorShard:
        """Return a tensor as the shard that is the whole tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
