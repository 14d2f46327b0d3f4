"""Bytes that a rank holds for parameters, gradients and optimizer state: by formula, and by the real shard sizes.

For P elements in 2 bytes, gradients alike, K bytes of optimizer state per element (fp32 master weights and Adam's two
moments: 12) on N ranks, ZeRO (arXiv:1910.02054, figure 1) has

    ZeRO stage    0               1                  2                   3
    bytes         (2 + 2 + K) P   (2 + 2 + K/N) P    (2 + (2 + K)/N) P   (2 + 2 + K) P / N

`predicted_memory` is this formula with each rank's real shards: slices differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ascend_parallel.sharding.layout import Shape
from ascend_parallel.training.optimizer.partition import partition


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of a rank between backward and step, without the buffers of collectives (two or three buckets)."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.parameters + self.gradients + self.optimizer


def predicted_memory(
    shapes: Sequence[Shape],
    *,
    zero_stage: int,
    ranks: int,
    rank: int = 0,
    partition_by: str = "slices",
    itemsize: int = 4,
    master_itemsize: int | None = None,
    grad_itemsize: int | None = None,
    states: int = 2,
) -> OptimizerMemory:
    """Return the bytes that a rank holds.

    shapes
        The parameters' shapes as a rank holds them before they are partitioned over `ranks` replicas.
    rank
        The rank's index among the replicas. With "slices" the first rank holds the most.
    itemsize, master_itemsize, grad_itemsize
        Bytes of an element of parameters and gradients; of master weights and state; of gradients, if these differ:
        16-bit gradients that several backwards add to are kept in fp32.
    states
        Tensors of the parameter's size in the state: `OptimizerFactory.states`; 2 for Adam.

    Gradients that are summed in fp32 (ZeRO stage 2) count as fp32. ZeRO stage 3 counts as `ParallelOptimizer`
    partitions: a parameter that a layout cannot cut stays whole, which this formula leaves out.
    """
    whole = sum(prod(shape) for shape in shapes)
    partitions = partition(shapes, ranks, partition_by) if zero_stage else []
    own = sum(bounds.size for rank_bounds in partitions if (bounds := rank_bounds[rank])) if zero_stage else whole
    kept = states * (master_itemsize or itemsize) + (master_itemsize or 0)
    parameters = (own if zero_stage == 3 else whole) * itemsize
    of_gradient = grad_itemsize or (max(master_itemsize or itemsize, 4) if zero_stage == 2 else itemsize)
    return OptimizerMemory(parameters, (own if zero_stage >= 2 else whole) * of_gradient, own * kept)
