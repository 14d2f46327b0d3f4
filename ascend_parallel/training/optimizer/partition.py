"""Partition parameters among ranks, and predict the bytes of each. Pure, with the same result on all ranks.

"slices" (weights sharding): each parameter is cut along its longest dimension as torch.chunk cuts. Any size works;
later slices are smaller or missing. "parameters" (weights grouping): each parameter belongs to one rank, the largest
first to the rank that has the least so far. Slices are rectangular, so the optimizer's state can be saved and loaded
in the coordinates of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout, Shape, shard
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.tuning.step_time.rank_bytes import (
    ADAM_STATES,
    RankBytes,
    gradient_bytes,
    optimizer_bytes,
    zero_bytes,
)

PARTITIONS = ("slices", "parameters")


@dataclass(frozen=True)
class ShardBounds:
    """Where a shard lies in a tensor: its start on each dimension, and its shape."""

    offsets: tuple[int, ...]
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements, at least 1."""
        return prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of `tensor` inside these bounds."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))]


Partition = tuple[ShardBounds | None, ...]
"""The bounds of each rank's shard; None: the rank has no shard."""


def full_bounds(shape: Shape) -> ShardBounds:
    """Return the bounds of a whole tensor."""
    return ShardBounds((0,) * len(shape), tuple(shape))


def partition(shapes: Sequence[Shape], ranks: int, partition_by: str) -> list[Partition]:
    """Return, for each parameter, the bounds of the shard of each of `ranks` ranks.

    A parameter without dimensions belongs to one rank.
    """
    partitions: list[Partition] = [(None,) * ranks] * len(shapes)
    load = [0] * ranks
    uncut = []
    for index, shape in enumerate(shapes):
        if partition_by == "slices" and shape and ranks > 1:
            partitions[index] = _slices(shape, ranks)
            load = [
                elements + (bounds.size if bounds else 0)
                for elements, bounds in zip(load, partitions[index], strict=True)
            ]
        elif prod(shape):
            uncut.append(index)
    for index in sorted(uncut, key=lambda index: (-prod(shapes[index]), index)):
        owner = load.index(min(load))
        load[owner] += prod(shapes[index])
        partitions[index] = tuple(full_bounds(shapes[index]) if rank == owner else None for rank in range(ranks))
    return partitions


def _slices(shape: Shape, ranks: int) -> Partition:
    dim = shape.index(max(shape))
    width = -(-shape[dim] // ranks)
    return tuple(_slice(shape, dim, min(rank * width, shape[dim]), width) for rank in range(ranks))


def _slice(shape: Shape, dim: int, start: int, width: int) -> ShardBounds | None:
    size = min(width, shape[dim] - start)
    offsets = tuple(start if index == dim else 0 for index in range(len(shape)))
    bounds = ShardBounds(offsets, (*shape[:dim], size, *shape[dim + 1 :]))
    return bounds if bounds.size else None


def predicted_memory(
    shapes: Sequence[Shape],
    *,
    zero_stage: int,
    ranks: int,
    rank: int = 0,
    partition_by: str = "slices",
    itemsize: int = 4,
    master_itemsize: int | None = None,
    wide_gradients: bool = False,
    states: int = ADAM_STATES,
) -> RankBytes:
    """Return the bytes that a rank holds for parameters, gradients and optimizer state.

    For P elements in 2 bytes, gradients alike, K bytes of optimizer state per element (fp32 master weights and Adam's
    two moments: 12) on N ranks, ZeRO (arXiv:1910.02054, figure 1) has

        ZeRO stage    0               1                  2                   3
        bytes         (2 + 2 + K) P   (2 + 2 + K/N) P    (2 + (2 + K)/N) P   (2 + 2 + K) P / N

    This is the same formula with each rank's real shards: slices differ in size.

    shapes
        The parameters' shapes as a rank holds them before they are partitioned over `ranks` replicas.
    rank
        The rank's index among the replicas. With "slices" the first rank holds the most.
    itemsize, master_itemsize
        Bytes of an element of parameters and gradients; of master weights and state.
    wide_gradients
        Whether 16-bit gradients are kept in fp32: several backwards add to them.
    states
        Tensors of the parameter's size in the state: `OptimizerFactory.states`.

    Gradients that are summed in fp32 (ZeRO stage 2) count as fp32. ZeRO stage 3 counts as `ParallelOptimizer`
    partitions: a parameter that a layout cannot cut stays whole, which this formula leaves out.
    """
    whole = sum(prod(shape) for shape in shapes)
    partitions = partition(shapes, ranks, partition_by) if zero_stage else []
    own = sum(bounds.size for rank_bounds in partitions if (bounds := rank_bounds[rank])) if zero_stage else whole
    gradient = gradient_bytes(itemsize, zero_stage, wide=wide_gradients)
    element = itemsize, gradient, optimizer_bytes(itemsize, master_itemsize, states)
    return RankBytes(*zero_bytes(whole, own, zero_stage, element))


def sharded_parameters(plan: ShardingPlan, dim: str = "dp", *, regather: bool = True) -> ShardingPlan:
    """Return the plan of ZeRO stage 3: each parameter that is replicated on the mesh dimension `dim` is cut along it.

    The cut is along the parameter's longest dimension that no other mesh dimension cuts. The parameter is gathered
    where operators read it; its gradient is reduce-scattered instead of all-reduced. Slices may be uneven: the last
    ranks' are smaller or empty. A parameter without a free dimension of 2 or more stays replicated, and so do buffers.

    regather
        Gather parameters again in backward, also those that the plan had cut. False: keep each gathered parameter until
        its backward, which takes as much memory as ZeRO stage 2 and sends a third less.

    Raises `ValueError` for a name that is no mesh dimension.
    """
    index = plan.mesh.dim(dim)
    if plan.mesh.shape[index] == 1:
        return plan
    layouts, cut = dict(plan.layouts), set()
    for node in plan.graph.nodes.values():
        if node.kind == PARAMETER:
            value = Value(node.name)
            layouts[value] = _cut(layouts[value], index, node.outputs[0].shape)
            cut |= {value} if layouts[value][index].kind == "shard" else set()
    return replace(plan, layouts=layouts, regathered=frozenset(cut) if regather else frozenset())


def _cut(layout: Layout, mesh_dim: int, shape: Shape) -> Layout:
    if layout[mesh_dim] != REPLICATE:
        return layout
    taken = {placement.dim for placement in layout if placement.kind == "shard"}
    free = [dim for dim, size in enumerate(shape) if dim not in taken and size > 1]
    if not free:
        return layout
    longest = max(free, key=lambda dim: (shape[dim], -dim))
    return (*layout[:mesh_dim], shard(longest), *layout[mesh_dim + 1 :])
