"""Which parameters' gradients are summed after what makes them, over which mesh dimensions, in which buckets.

A parameter that is whole on a mesh dimension and read as a copy there has a gradient that is a part of a sum. Its leaf
is then read as a copy too, so that what arrives at it is this rank's term, and the terms of many parameters are summed
as one (gradients.py). Pure: no process is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout, Placement, local_size
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.overlap_pass import Schedule

BUCKET_BYTES = 25 << 20
# Of the first bucket, so that what it sends begins early: as torch/nn/parallel/distributed.py has it.
FIRST_BYTES = 1 << 20
"""As torch's DistributedDataParallel has it."""


@dataclass(frozen=True)
class Summed:
    """A parameter held whole on some mesh dimensions.

    dims
        Those over which its gradient has to be summed.
    whole
        Those on which every rank computes the whole gradient.
    nbytes
        Of the gradient that a rank holds.
    """

    value: Value
    name: str
    dims: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed as one, over the same mesh dimensions."""

    members: tuple[Summed, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The mesh dimensions, in the order of the sums."""
        return self.members[0].dims

    @property
    def nbytes(self) -> int:
        """Bytes that a rank has of it."""
        return sum(one.nbytes for one in self.members)


def read_as_copies(schedule: Schedule, plan: ShardingPlan) -> tuple[Schedule, tuple[Summed, ...]]:
    """Return a schedule in which such parameters are copies, and all parameters held whole somewhere.

    These are in the order in which a forward reads them first.
    """
    layouts, via, found = dict(schedule.layouts), dict(schedule.shared_layouts), {}
    for value, ends in _read(schedule, plan).items():
        dims: list[int] = []
        whole: list[int] = []
        for dim, size in enumerate(plan.mesh.shape):
            if size > 1 and layouts[value][dim] == REPLICATE:
                (dims if any(end[dim] == PARTIAL_GRAD for end in ends) else whole).append(dim)
        meta, node = plan.graph.meta(value), plan.graph.nodes[value.node]
        nbytes = local_size(meta.shape, layouts[value], plan.mesh.shape) * meta.dtype.itemsize
        if dims or whole:
            found[value] = Summed(value, node.source, tuple(dims), tuple(whole), meta.dtype, nbytes)
        layouts[value] = _copied(layouts[value], dims)
        if value in via:
            via[value] = _copied(via[value], dims)
    return replace(schedule, layouts=layouts, shared_layouts=via), tuple(found.values())


def _copied(layout: Layout, dims: Sequence[int]) -> Layout:
    def copied(dim: int, state: Placement) -> Placement:
        return PARTIAL_GRAD if dim in dims and state == REPLICATE else state

    return tuple(copied(dim, state) for dim, state in enumerate(layout))


def _read(schedule: Schedule, plan: ShardingPlan) -> dict[Value, list[Layout]]:
    """Return the layouts in which each parameter is read, in the order of the first readers."""
    found: dict[Value, list[Layout]] = {}

    def read(value: Value, layout: Layout) -> None:
        if plan.graph.nodes[value.node].kind == PARAMETER and value in plan.differentiable:
            shared = schedule.shared_layouts.get(value)
            found.setdefault(value, []).append(layout if shared is None else _seen(shared, layout))

    for name in (name for unit in units_of(schedule, plan) for name in unit):
        for value, layout in zip(plan.graph.nodes[name].inputs, schedule.inputs[name], strict=True):
            read(value, layout)
    for leaf in pytree.tree_leaves(plan.graph.outputs):
        if isinstance(leaf, Value):
            read(leaf, plan.returned_layout(leaf))
    return found


def _seen(shared: Layout, layout: Layout) -> Layout:
    """Return the layout in which a reader sees the parameter: the shared layout's, or its own."""
    return tuple(mine if through == REPLICATE else through for through, mine in zip(shared, layout, strict=True))


def units_of(schedule: Schedule, plan: ShardingPlan) -> Iterator[tuple[str, ...]]:
    """Yield the nodes as they run: alone, or those of a kernel at the place of the first."""
    done: set[str] = set()
    for name in plan.graph.nodes:
        if name not in done:
            unit = tuple(schedule.kernels[name].nodes) if name in schedule.kernels else (name,)
            done |= set(unit)
            yield unit


def buckets(summed: Sequence[Summed], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which a backward fills them: the last that was read comes first.

    Each has parameters of one dtype and the same mesh dimensions, and at most `bucket_bytes`, the first of a kind at
    most `FIRST_BYTES`, unless it is of one.
    """
    found: list[list[Summed]] = []
    open_ones: dict[tuple[object, ...], list[Summed]] = {}
    limits: dict[tuple[object, ...], int] = {}
    for one in reversed([one for one in summed if one.dims]):
        key = (one.dims, one.dtype)
        members = open_ones.get(key, [])
        if not members or sum(member.nbytes for member in members) + one.nbytes > limits[key]:
            limits[key] = bucket_bytes if key in limits else min(bucket_bytes, FIRST_BYTES)
            members = open_ones[key] = []
            found.append(members)
        members.append(one)
    return tuple(Bucket(tuple(members)) for members in found)
