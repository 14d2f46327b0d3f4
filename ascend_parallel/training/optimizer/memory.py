"""Bytes that a rank holds for parameters, gradients and optimizer, by formula and as counted.

For P elements in 2 bytes, gradients alike, K bytes of optimizer state per element (fp32 master weights and Adam's two
moments: 12) on N ranks, ZeRO (arXiv:1910.02054, figure 1) has

    level    0               1                  2                   3
    bytes    (2 + 2 + K) P   (2 + 2 + K/N) P    (2 + (2 + K)/N) P   (2 + 2 + K) P / N

`predicted_memory` is that with the boxes that each rank really has: slices are not all of a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ascend_parallel.sharding.layout import Shape
from ascend_parallel.training.optimizer.partition import divide


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of a rank between backward and step; buffers of collectives come on top, two or three buckets."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def predicted_memory(
    shapes: Sequence[Shape],
    *,
    level: int,
    ranks: int,
    rank: int = 0,
    by: str = "slices",
    itemsize: int = 4,
    master_itemsize: int | None = None,
    grad_itemsize: int | None = None,
    states: int = 2,
) -> OptimizerMemory:
    """Return what a rank holds.

    shapes
        Of the parameters, as a rank holds them before they are divided over `ranks` replicas.
    rank
        Among the replicas; the first holds as many as any, by "slices".
    itemsize, master_itemsize, grad_itemsize
        Bytes of an element of parameters and gradients, of master weights and state, and of gradients, if these are
        others: those of 16 bits that several backwards add to are kept in fp32.
    states
        Tensors of the parameter's size in the state: `Recipe.states`; 2 for Adam.

    Gradients that are summed in fp32 (level 2) count so. Level 3 as `ParallelOptimizer` divides: what a
    layout cannot cut stays whole, and is no part of this formula.
    """
    whole = sum(prod(shape) for shape in shapes)
    divisions = divide(shapes, ranks, by) if level else []
    own = sum(box.size for division in divisions if (box := division[rank])) if level else whole
    kept = states * (master_itemsize or itemsize) + (master_itemsize or 0)
    parameters = (own if level == 3 else whole) * itemsize
    of_gradient = grad_itemsize or (max(master_itemsize or itemsize, 4) if level == 2 else itemsize)
    return OptimizerMemory(parameters, (own if level >= 2 else whole) * of_gradient, own * kept)
