"""Sums of gradients under the backward: their buckets, and what of them is left when the backward has ended.

A parameter that is replicated on a mesh dimension and read as R* there has a gradient that is summed over it. The
runtime sums the gradients of many parameters as one tensor, as soon as backward has all of them. So a bucket costs one
collective's fixed time, and runs beside the backward of what the forward read before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from ascend_parallel.sharding.bucketing import BUCKET_BYTES, FIRST_BYTES, form_buckets
from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout, forward
from ascend_parallel.sharding.planner.operator_cost import PASSES, seconds
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.planner.sharding_plan import Conversion, ShardingPlan
from ascend_parallel.sharding.redistribute.costs import ALL_REDUCE, MeshCosts
from ascend_parallel.tuning.cost_model.cost import CostModel

# The share of an operator's time that is backward.
BACKWARD = (PASSES - 1) / PASSES


@dataclass(frozen=True)
class SumsOfGradients:
    """Seconds of a plan's sums of gradients.

    alone
        Each parameter's by itself, as the conversions of the plan have them.
    exposed
        In buckets: by how much the last of them outlasts the backward.
    critical
        The first readers, first and last, of the parameters of the bucket from which on buckets outlast it; or none.
    """

    alone: float
    exposed: float
    critical: tuple[str, str] | None = None

    @property
    def hidden(self) -> float:
        """What buckets save and the backward hides."""
        return self.alone - self.exposed


def sums_of_gradients(plan: ShardingPlan) -> SumsOfGradients:
    """Return what the sums of gradients of a plan cost whose `cost` has each of them alone.

    Other collectives that run beside computation keep the link busy for their share of it.
    """
    alone = sum(one.back.seconds for one in plan.conversions if one.back and is_sum(plan, one))
    hardware = plan.costs.hardware
    took = dict(_computation(plan)) if alone and hardware is not None else {}
    computing = sum(took.values())
    if hardware is None or not computing:
        return SumsOfGradients(alone, alone)
    busy = max(0.0, computing + plan.seconds - plan.cost) / computing
    free = BACKWARD * max(0.0, 1 - busy) / max(CostModel(hardware).stretches(1.0, 1.0))
    before = dict(zip(took, accumulate(took.values(), initial=0.0), strict=False))
    formed = _buckets(plan, {name: place for place, name in enumerate(took)})
    rest, exposed, critical = 0.0, 0.0, None
    for readers, dims, nbytes in reversed(formed):
        rest += bucket_seconds(plan.costs, nbytes, dims)
        if rest - free * before[readers[0]] > exposed:
            exposed, critical = rest - free * before[readers[0]], readers
    return SumsOfGradients(alone, exposed, critical)


def bucket_seconds(costs: MeshCosts, nbytes: float, dims: Iterable[int]) -> float:
    """Return the seconds of the all-reduces of a bucket, over one mesh dimension after the other."""
    return sum(costs.seconds(ALL_REDUCE, nbytes, dim) for dim in dims)


def summed_dims(held: Layout, read: Layout) -> tuple[int, ...]:
    """Return the mesh dimensions over which a parameter's gradient is summed; none if the parameter is converted."""
    if forward(held) != forward(read):
        return ()
    return tuple(
        dim
        for dim, (mine, theirs) in enumerate(zip(held, read, strict=True))
        if mine == REPLICATE and theirs == PARTIAL_GRAD
    )


def is_sum(plan: ShardingPlan, one: Conversion) -> bool:
    """Tell whether a conversion is the sum of a replicated parameter's gradient, and nothing else."""
    return plan.graph.nodes[one.value.node].kind == PARAMETER and bool(summed_dims(one.source, one.target))


def _computation(plan: ShardingPlan) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each operator, in the order of the forward."""
    hardware, shape = plan.costs.hardware, tuple(plan.mesh.shape)
    assert hardware is not None
    model = CostModel(hardware)
    for name, node in plan.graph.nodes.items():
        if node.call is not None:
            option = Option(plan.inputs[name], plan.output_layouts(node))
            yield name, seconds(node.call, option, shape, model)


_Bucket = tuple[tuple[str, str], tuple[int, ...], int]
"""The first and the last of its parameters' first readers, the mesh dimensions of its sums, and its bytes."""


def _buckets(plan: ShardingPlan, place: Mapping[str, int]) -> list[_Bucket]:
    """Return the buckets in the order in which they start; a bucket waits for the start of those before it."""
    summed = sorted(_summed(plan, place), key=lambda each: place[each.reader], reverse=True)
    found: list[_Bucket] = []
    for indices in form_buckets((((each.dims, each.dtype), each.nbytes) for each in summed), BUCKET_BYTES, FIRST_BYTES):
        of_bucket = [summed[index] for index in indices]
        first = min((of_bucket[-1].reader, *(readers[0] for readers, *_ in found[-1:])), key=place.__getitem__)
        found.append(((first, of_bucket[0].reader), of_bucket[0].dims, sum(each.nbytes for each in of_bucket)))
    return found


@dataclass(frozen=True)
class _Summed:
    """A parameter whose gradient is summed over mesh dimensions, and its first reader."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    reader: str


def _summed(plan: ShardingPlan, place: Mapping[str, int]) -> Iterator[_Summed]:
    for value, readers in plan.graph.readers().items():
        if plan.graph.nodes[value.node].kind == PARAMETER and value in plan.differentiable:
            held, meta = plan.layouts[value], plan.graph.meta(value)
            common = [plan.shared_layouts[value]] if value in plan.shared_layouts else []
            reads = [*common, *(plan.inputs[name][index] for name, index in readers)]
            dims = tuple(sorted({dim for read in reads for dim in summed_dims(held, read)}))
            if dims:
                nbytes = int(meta.local_bytes(held, tuple(plan.mesh.shape)))
                yield _Summed(dims, meta.dtype, nbytes, min((name for name, _ in readers), key=place.__getitem__))
