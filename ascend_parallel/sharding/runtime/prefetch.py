"""Plans which redistributions of a forward are prefetched: where they start, and which run as one collective.

Parameters and inputs exist from the start. They form groups in the order in which they are read. A group starts where
the group before it is first read, so at most two groups are in flight or in memory. The output of an operator starts
after the operator, at most `LOOK_AHEAD` operators before its reader. A collective that no operator can overlap is not
prefetched. In backward the collectives start at the reader and are waited for where forward started them. Planning runs
no collective.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ascend_parallel.sharding.bucketing import FIRST_BYTES, form_buckets
from ascend_parallel.sharding.graph import CALL, Value
from ascend_parallel.sharding.layout import Layout, local_size
from ascend_parallel.sharding.planner.overlap_pass import FusedPlan
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.edges import plan_differentiable
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep

LOOK_AHEAD = 16


@dataclass(frozen=True)
class Prefetch:
    """A redistribution of a tensor for the node `reader`, or for all of its readers if `reader` is "shared"."""

    value: Value
    reader: str
    module: str
    source: Layout
    target: Layout


@dataclass(frozen=True)
class PrefetchGroup:
    """Redistributions that start as one collective before the node `before` runs.

    nbytes
        Bytes of the results on a rank.
    """

    before: str
    kind: str
    mesh_dim: int
    conversions: tuple[Prefetch, ...]
    nbytes: int


@dataclass(frozen=True)
class _Candidate:
    """A redistribution that may be prefetched, between two positions in the order of operators.

    is_input
        Whether the tensor is a parameter, buffer, constant or input, and not the output of an operator.
    ready, needed
        The first position at which the tensor exists, and the position of its reader.
    coalesce_key
        Candidates with equal keys can run as one collective.
    """

    prefetch: Prefetch
    step: RedistributeStep
    is_input: bool
    ready: int
    needed: int
    nbytes: int
    coalesce_key: Hashable


def prefetch_groups(
    fused_plan: FusedPlan, plan: ShardingPlan, recomputed: Set[str], bucket_bytes: int
) -> dict[str, list[PrefetchGroup]]:
    """Return the prefetch groups, by the node before which they start.

    recomputed
        Nodes that backward recomputes. Their inputs are not prefetched.
    bucket_bytes
        The most bytes of a group, unless a single tensor is larger; for the first group of a kind `FIRST_BYTES`.
    """
    units, ready = _units(fused_plan, plan)
    outside = [place for place, unit in enumerate(units) if not recomputed & set(unit)]
    candidates = list(_candidates(fused_plan, plan, units, ready, set(outside)))
    groups: dict[str, list[PrefetchGroup]] = {}
    for start, members in (*_input_groups(candidates, bucket_bytes), *_output_groups(candidates)):
        first = members[0]
        place = outside[bisect_left(outside, max(start, *(member.ready for member in members)))]
        if place < first.needed or len(members) > 1:
            prefetches = tuple(member.prefetch for member in members)
            node, nbytes = units[place][0], sum(member.nbytes for member in members)
            group = PrefetchGroup(node, first.step.kind, first.step.mesh_dim, prefetches, nbytes)
            groups.setdefault(node, []).append(group)
    return groups


def _units(fused_plan: FusedPlan, plan: ShardingPlan) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """Return the operators in running order, and by node the position of the first that can read its output."""
    units: list[tuple[str, ...]] = []
    ready: dict[str, int] = {}
    for unit in fused_plan.units(plan.graph):
        if plan.graph.nodes[unit[0]].kind == CALL:
            units.append(unit)
        ready |= dict.fromkeys(unit, len(units))
    return units, ready


def _candidates(
    fused_plan: FusedPlan,
    plan: ShardingPlan,
    units: Sequence[Sequence[str]],
    ready: Mapping[str, int],
    outside: Set[int],
) -> Iterator[_Candidate]:
    """Yield the redistributions with a single collective, in the order in which their results are needed."""
    seen: set[Hashable] = set()
    for place, unit in enumerate(units):
        for node in (plan.graph.nodes[name] for name in unit):
            for value, target in zip(node.inputs, fused_plan.inputs[node.name], strict=True):
                source, shared = fused_plan.layouts[value], fused_plan.shared_layouts.get(value)
                prefetch = Prefetch(value, node.name, node.module, source, target)
                if shared is not None:
                    prefetch = Prefetch(value, "shared", plan.graph.nodes[value.node].module, source, shared)
                key = (value, target, place) if shared is None else value
                if key not in seen and place in outside:
                    yield from _candidate(plan, prefetch, ready[value.node], place)
                seen.add(key)


def _candidate(plan: ShardingPlan, prefetch: Prefetch, ready: int, needed: int) -> Iterator[_Candidate]:
    """Yield the candidate if the redistribution has a single collective."""
    meta, value, source, target = plan.graph.meta(prefetch.value), prefetch.value, prefetch.source, prefetch.target
    if source == target:
        return
    both = plan_differentiable(meta.shape, meta.dtype.itemsize, plan.mesh, source, target, plan.costs)
    steps = [step for step in both.forward.steps if step.nbytes]
    if len(steps) == 1:
        nbytes = local_size(meta.shape, target, plan.mesh.shape) * meta.dtype.itemsize
        is_input = plan.graph.nodes[value.node].kind != CALL
        coalesce_key = (steps[0].kind, steps[0].mesh_dim, meta.dtype, value in plan.differentiable)
        yield _Candidate(prefetch, steps[0], is_input, ready, needed, nbytes, coalesce_key)


def _input_groups(candidates: Sequence[_Candidate], bucket_bytes: int) -> Iterator[tuple[int, list[_Candidate]]]:
    """Yield groups of parameters and inputs, and the earliest position of each group."""
    inputs = [candidate for candidate in candidates if candidate.is_input]
    before: dict[Hashable, int] = {}
    keys = ((candidate.coalesce_key, candidate.nbytes) for candidate in inputs)
    for indices in form_buckets(keys, bucket_bytes, FIRST_BYTES):
        group = [inputs[index] for index in indices]
        yield before.get(group[0].coalesce_key, 0), group
        before[group[0].coalesce_key] = group[0].needed


def _output_groups(candidates: Sequence[_Candidate]) -> Iterator[tuple[int, list[_Candidate]]]:
    """Yield groups of operator outputs that can start at the same position."""
    groups: dict[Hashable, list[_Candidate]] = {}
    for candidate in candidates:
        if not candidate.is_input:
            start = max(candidate.ready, candidate.needed - LOOK_AHEAD)
            groups.setdefault((start, candidate.coalesce_key), []).append(candidate)
    for group in groups.values():
        yield group[0].needed - LOOK_AHEAD, group
