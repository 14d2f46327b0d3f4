"""Sums of gradients under the backward: their buckets, and what of them is left when the backward has ended.

A parameter that is replicated on a mesh dimension and read as R* there has a gradient that is summed over it. The
runtime sums the gradients of many parameters as one tensor, as soon as backward has all of them. So a bucket costs one
collective's fixed time, and runs beside the backward of what the forward read before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.sharding.bucketing import FIRST_BYTES, form_buckets
from ascend_parallel.sharding.graph import PARAMETER, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout, forward
from ascend_parallel.sharding.planner.sharding_plan import Conversion, ShardingPlan
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.step_time.runtimes import BUCKET_BYTES

# The share of an operator's time that is backward: two of a matmul's three products, about two of three passes else.
BACKWARD = 2 / 3
Readers = Mapping[Value, Sequence[tuple[str, int]]]
"""Of `Graph.readers`."""


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


def sums_of_gradients(plan: ShardingPlan, took: Mapping[str, float], readers: Readers) -> SumsOfGradients:
    """Return the cost of a plan's gradient sums in buckets; the plan's own `cost` counts each sum alone.

    took: the seconds of each operator, in the order of the forward. readers: of the plan's graph.

    Other collectives that run beside computation take their share of the link.
    """
    alone = sum(one.back.seconds for one in plan.conversions if one.back and is_sum(plan, one))
    hardware, computing = plan.costs.hardware, sum(took.values())
    if not alone or hardware is None or not computing:
        return SumsOfGradients(alone, alone)
    busy = max(0.0, computing + plan.seconds - plan.cost) / computing
    free = BACKWARD * max(0.0, 1 - busy) / max(CostModel(hardware).stretches(1.0, 1.0))
    before = dict(zip(took, accumulate(took.values(), initial=0.0), strict=False))
    formed = _buckets(plan, {name: place for place, name in enumerate(took)}, readers)
    rest, exposed, critical = 0.0, 0.0, None
    for first_and_last, dims, nbytes in reversed(formed):
        rest += bucket_seconds(plan.costs, nbytes, dims)
        if rest - free * before[first_and_last[0]] > exposed:
            exposed, critical = rest - free * before[first_and_last[0]], first_and_last
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


_Bucket = tuple[tuple[str, str], tuple[int, ...], int]
"""The first and the last of its parameters' first readers, the mesh dimensions of its sums, and its bytes."""


def _buckets(plan: ShardingPlan, place: Mapping[str, int], readers: Readers) -> list[_Bucket]:
    """Return the buckets in the order in which they start; a bucket waits for the start of those before it."""
    summed = sorted(_summed(plan, place, readers), key=lambda each: place[each.reader], reverse=True)
    found: list[_Bucket] = []
    for indices in form_buckets((((each.dims, each.dtype), each.nbytes) for each in summed), BUCKET_BYTES, FIRST_BYTES):
        of_bucket = [summed[index] for index in indices]
        first = min((of_bucket[-1].reader, *(ends[0] for ends, *_ in found[-1:])), key=place.__getitem__)
        found.append(((first, of_bucket[0].reader), of_bucket[0].dims, sum(each.nbytes for each in of_bucket)))
    return found


@dataclass(frozen=True)
class _Summed:
    """A parameter whose gradient is summed over mesh dimensions, and its first reader."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    reader: str


def _summed(plan: ShardingPlan, place: Mapping[str, int], readers: Readers) -> Iterator[_Summed]:
    for value, of_value in readers.items():
        if plan.graph.nodes[value.node].kind == PARAMETER and value in plan.differentiable:
            held, meta = plan.layouts[value], plan.graph.meta(value)
            common = [plan.shared_layouts[value]] if value in plan.shared_layouts else []
            reads = [*common, *(plan.inputs[name][index] for name, index in of_value)]
            dims = tuple(sorted({dim for read in reads for dim in summed_dims(held, read)}))
            if dims:
                nbytes = int(meta.local_bytes(held, plan.mesh.shape))
                yield _Summed(dims, meta.dtype, nbytes, min((name for name, _ in of_value), key=place.__getitem__))
