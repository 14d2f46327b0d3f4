"""Which conversions of a forward start ahead of the node that reads them, where, and which of them as one collective.

Parameters and inputs are there from the beginning. They go in groups, in the order in which they are read: a group
starts where the one before is first read, so that no more than two are on their way or there. A tensor that an operator
makes starts after that, at most `LOOK_AHEAD` operators before its reader. Where nothing can run beside it, a collective
stays where it stands. In backward, what starts ahead is waited for late: at the place of the start. Pure: no process is
asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ascend_parallel.sharding.graph import CALL, Value
from ascend_parallel.sharding.layout import Layout, local_size
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.runtime.gradient_plan import FIRST_BYTES, units_of
from ascend_parallel.sharding.runtime.overlap_pass import Schedule
from ascend_parallel.sharding.runtime.redistribute_autograd import ways_between

LOOK_AHEAD = 16


@dataclass(frozen=True)
class Prefetch:
    """A conversion of a tensor for a node, or "shared" for all of its readers."""

    value: Value
    reader: str
    module: str
    source: Layout
    target: Layout


@dataclass(frozen=True)
class PrefetchGroup:
    """Conversions whose collectives start as one before a node runs.

    nbytes
        Of what a rank then holds more.
    """

    before: str
    kind: str
    mesh_dim: int
    conversions: tuple[Prefetch, ...]
    nbytes: int


@dataclass(frozen=True)
class _Found:
    """A conversion that may start ahead, from the place where it is ready to the one where it is needed.

    given
        Whether no operator makes it.
    """

    early: Prefetch
    step: RedistributeStep
    given: bool
    ready: int
    needed: int
    nbytes: int
    like: Hashable


def start_ahead(
    schedule: Schedule, plan: ShardingPlan, recomputed: Set[str], bucket_bytes: int
) -> dict[str, list[PrefetchGroup]]:
    """Return what starts ahead, by the node before which it starts.

    recomputed
        Nodes that run again in backward: what they read stays where it stands.
    bucket_bytes
        How much is gathered as one, unless it is one tensor; the first of a kind is at most `FIRST_BYTES`.
    """
    units, ready = _units(schedule, plan)
    outside = [place for place, unit in enumerate(units) if not recomputed & set(unit)]
    found = list(_found(schedule, plan, units, ready, set(outside)))
    started: dict[str, list[PrefetchGroup]] = {}
    for start, group in (*_of_given(found, bucket_bytes), *_of_operators(found)):
        first = group[0]
        at = next(place for place in outside if place >= max(start, *(one.ready for one in group)))
        if at < first.needed or len(group) > 1:
            early = tuple(one.early for one in group)
            node, nbytes = units[at][0], sum(one.nbytes for one in group)
            started.setdefault(node, []).append(
                PrefetchGroup(node, first.step.kind, first.step.mesh_dim, early, nbytes)
            )
    return started


def _units(schedule: Schedule, plan: ShardingPlan) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """Return the operators as they run, and, by node, the place of the first that can read what the node gives."""
    units: list[tuple[str, ...]] = []
    ready: dict[str, int] = {}
    for unit in units_of(schedule, plan):
        if plan.graph.nodes[unit[0]].kind == CALL:
            units.append(unit)
        ready |= dict.fromkeys(unit, len(units))
    return units, ready


def _found(
    schedule: Schedule,
    plan: ShardingPlan,
    units: Sequence[Sequence[str]],
    ready: Mapping[str, int],
    outside: Set[int],
) -> Iterator[_Found]:
    """Yield the conversions that communicate once, in the order in which they are needed."""
    seen: set[Hashable] = set()
    for place, unit in enumerate(units):
        for node in (plan.graph.nodes[name] for name in unit):
            for value, target in zip(node.inputs, schedule.inputs[node.name], strict=True):
                maker, shared, at = (
                    plan.graph.nodes[value.node],
                    schedule.shared_layouts.get(value),
                    schedule.layouts[value],
                )
                early = Prefetch(value, node.name, node.module, at, target)
                if shared is not None:
                    early = Prefetch(value, "shared", maker.module, at, shared)
                key = (value, target, place) if shared is None else value
                if key not in seen and place in outside:
                    yield from _communicating(plan, early, ready[value.node], place)
                seen.add(key)


def _communicating(plan: ShardingPlan, early: Prefetch, ready: int, needed: int) -> Iterator[_Found]:
    meta = plan.graph.meta(early.value)
    if early.source == early.target:
        return
    ways = ways_between(meta.shape, meta.dtype.itemsize, plan.mesh, early.source, early.target, plan.costs)
    steps = [step for step in ways.ahead.steps if step.nbytes]
    if len(steps) == 1:
        nbytes = local_size(meta.shape, early.target, plan.mesh.shape) * meta.dtype.itemsize
        given = plan.graph.nodes[early.value.node].kind != CALL
        like = (steps[0].kind, steps[0].mesh_dim, meta.dtype, early.value in plan.differentiable)
        yield _Found(early, steps[0], given, ready, needed, nbytes, like)


def _of_given(found: Sequence[_Found], bucket_bytes: int) -> Iterator[tuple[int, list[_Found]]]:
    """Yield groups of what no operator makes, and where each may start."""
    groups: dict[Hashable, list[list[_Found]]] = {}
    for one in found:
        if one.given:
            of_kind = groups.setdefault(one.like, [[]])
            limit = bucket_bytes if len(of_kind) > 1 else min(bucket_bytes, FIRST_BYTES)
            if of_kind[-1] and sum(other.nbytes for other in of_kind[-1]) + one.nbytes > limit:
                of_kind.append([])
            of_kind[-1].append(one)
    for of_kind in groups.values():
        for before, group in zip([None, *of_kind], of_kind, strict=False):
            yield 0 if before is None else before[0].needed, group


def _of_operators(found: Sequence[_Found]) -> Iterator[tuple[int, list[_Found]]]:
    """Yield groups of what operators make and that can start at the same place."""
    groups: dict[Hashable, list[_Found]] = {}
    for one in found:
        if not one.given:
            groups.setdefault((max(one.ready, one.needed - LOOK_AHEAD), one.like), []).append(one)
    for group in groups.values():
        yield group[0].needed - LOOK_AHEAD, group
