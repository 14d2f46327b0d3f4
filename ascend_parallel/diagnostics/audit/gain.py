"""What this package could hide of a profile's exposed collectives: the bound, and the cost model's time of chunks.

The layers of a profile have no names. So a collective is paired with a matmul of its rank: a sum with the matmul that
ended last before it (its product), a gather with the first that begins behind it (its reader). Matmuls and collectives
have their measured times; `ChunkedCall`, which `predict` prices too, says how they would run in chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ascend_parallel.diagnostics.audit.account import CollectiveCost, RankTime, group_roles
from ascend_parallel.diagnostics.audit.profile import MATMUL, Collective, Kernel, RankProfile
from ascend_parallel.diagnostics.audit.roles import CONTEXT, EXPERT, LAYER_BYTES, SEQUENCE, TENSOR, Role
from ascend_parallel.diagnostics.intervals import length, without
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall, makespan

CHUNKS = (2, 4, 8)
# Seconds that a collective of any size takes, where the profile has no small one.
LATENCY = 20e-6
# Less than this share of a step is no gain.
LEAST_SHARE = 0.01
# A device that waits for the host for a larger share of a step has no time for further launches.
STARVED = 0.2


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What overlap could save of a step, in ms; means over the ranks.

    bound
        Exposed communication of layers, as far as there is a matmul beside it that does not need it.
    predicted
        What `chunks` chunks would save by the cost model; 0 if no number of chunks saves.
    chunks
        The number of chunks with the largest prediction.
    exchanges
        Exposed communication of experts' or heads' exchanges, which run in groups: a bound without a price.
    pairs
        How many collectives were paired with a matmul.
    host_bound
        Whether the device waits for the host so long that further launches cost what they hide.
    """

    bound: float
    predicted: float
    chunks: int
    exchanges: float
    pairs: int
    host_bound: bool


@dataclass(frozen=True)
class _Pair:
    """A collective with the matmul beside it, in seconds; `exposed` is the part that nothing hides today."""

    matmul: float
    collective: float
    exposed: float
    gathers: bool


def gain(profiles: Sequence[RankProfile], costs: Sequence[CollectiveCost], ranks: Sequence[RankTime]) -> Gain:
    """Return the part of the profiles' collectives that this package could hide."""
    roles = group_roles(profiles)
    saved = dict.fromkeys(CHUNKS, 0.0)
    bound, pairs = 0.0, 0
    starved = any((rank.host or 0.0) > STARVED * rank.step for rank in ranks)
    for profile in profiles:
        share = 1e3 / profile.step_count / len(profiles)
        latency, issue = _latency(profile), _issue(profile)
        found = _pairs(profile, [one for one in profile.collectives if _of_a_layer(roles[one.group], one)])
        pairs += len(found)
        bound += share * sum(min(pair.matmul, pair.exposed) for pair in found)
        for chunks in CHUNKS:
            launches = 2 * (chunks - 1) * issue if starved else 0.0
            saved[chunks] += share * sum(_saved(pair, chunks, latency, issue) - launches for pair in found)
    best = max(CHUNKS, key=saved.__getitem__)
    exchanged = (EXPERT, CONTEXT)
    return Gain(
        bound=bound,
        predicted=max(min(saved[best], bound), 0.0),
        chunks=best,
        exchanges=sum(cost.exposed for cost in costs if cost.role.name in exchanged),
        pairs=pairs,
        host_bound=starved,
    )


def _of_a_layer(role: Role, collective: Collective) -> bool:
    large = collective.nbytes is None or collective.nbytes >= LAYER_BYTES
    return (
        large
        and role.name in (TENSOR, SEQUENCE)
        and collective.operation in ("all_reduce", "reduce_scatter", "all_gather")
    )


def _pairs(profile: RankProfile, collectives: Sequence[Collective]) -> list[_Pair]:
    """Pair collectives with matmuls; a matmul stands beside one collective, the first that asks for it."""
    matmuls = [kernel for kernel in profile.kernels if kernel.kind == MATMUL]
    begins = [kernel.begin for kernel in matmuls]
    by_end = sorted(matmuls, key=lambda kernel: kernel.end)
    ends = [kernel.end for kernel in by_end]
    computing = profile.busy()
    taken: set[int] = set()
    pairs = []
    for one in collectives:
        gathers = one.operation == "all_gather"
        matmul = _beside(one, matmuls, begins) if gathers else _before(one, by_end, ends)
        if matmul is None or id(matmul) in taken:
            continue
        taken.add(id(matmul))
        exposed = length(without([(one.begin, one.end)], computing))
        pairs.append(_Pair((matmul.end - matmul.begin) / 1e9, (one.end - one.begin) / 1e9, exposed / 1e9, gathers))
    return pairs


def _before(one: Collective, by_end: Sequence[Kernel], ends: Sequence[int]) -> Kernel | None:
    index = bisect_right(ends, one.begin) - 1
    return by_end[index] if index >= 0 else None


def _beside(one: Collective, matmuls: Sequence[Kernel], begins: Sequence[int]) -> Kernel | None:
    index = bisect_left(begins, one.end)
    return matmuls[index] if index < len(matmuls) else None


def _saved(pair: _Pair, chunks: int, latency: float, issue: float) -> float:
    """Return the seconds that chunks save of a pair; what is hidden already is no saving."""
    fixed = min(latency, pair.collective)
    wire = pair.collective - fixed
    call = ChunkedCall(
        compute=(pair.matmul / chunks,) * chunks,
        collective=(fixed + wire / chunks,) * chunks,
        communicate_first=pair.gathers,
        issue=issue,
    )
    return min(pair.matmul + pair.collective - makespan(call), pair.exposed)


def _latency(profile: RankProfile) -> float:
    """Return the seconds of the fastest small collective, or `LATENCY`."""
    small = [one.end - one.begin for one in profile.collectives if one.nbytes is not None and one.nbytes < LAYER_BYTES]
    return min(small) / 1e9 if small else LATENCY


def _issue(profile: RankProfile) -> float:
    """Return the seconds between two launches of the host, the median; 0 where the profile has none."""
    gaps = [second - first for first, second in zip(profile.launches, profile.launches[1:], strict=False)]
    return median(gaps) / 1e9 if gaps else 0.0
