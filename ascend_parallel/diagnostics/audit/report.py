"""The result of an audit: figures of a step, a sentence on what to do, a page with the lanes of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from ascend_parallel.diagnostics.audit.account import CollectiveCost, RankTime, collective_costs, mean_time, rank_time
from ascend_parallel.diagnostics.audit.files import read_run
from ascend_parallel.diagnostics.audit.gain import LEAST_SHARE, Gain, gain
from ascend_parallel.diagnostics.audit.profile import BACKWARD, FORWARD, MATMUL, ProcessGroup, RankProfile
from ascend_parallel.diagnostics.audit.roles import (
    CONTEXT,
    DATA,
    EXPERT,
    OURS,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    UNKNOWN,
    features_in,
)
from ascend_parallel.diagnostics.intervals import union, within, without
from ascend_parallel.diagnostics.timeline.merge import ticks
from ascend_parallel.diagnostics.timeline.picture import COLOURS, MEANING, Bar, Picture, RankLanes
from ascend_parallel.text import size_of
from ascend_parallel.text.templates import render

TEMPLATE = Path(__file__).with_name("audit.html.jinja")
# A page draws so many ranks, and joins bars that are nearer than a thousandth of the step.
MOST_LANES = 8
NEAR = 0.001
# The ends of a collective on devices may lie so far apart, in ms, before clocks are said to differ. On CPUs a rank sees
# an end when it has a core: a step apart is another clock.
CLOCKS_MS = 1.0
ADVICE = {
    EXPERT: "COC_PARALLEL_NUM runs experts in groups under their exchanges (docs/moe.md)",
    CONTEXT: "COC_PARALLEL_NUM runs heads in groups under their exchanges (docs/context.md)",
    DATA: "data parallelism is not this package's overlap: see your framework's buckets and prefetch",
    PIPELINE: "time in pipelines is waiting for other stages: more micro-batches, or another schedule",
}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a run's profiles say of a step.

    world_size
        Ranks of the run, if a profile says it.
    features
        Overlap that the profiles show, as sentences.
    gain
        What this package could hide of it.
    """

    profiles: Sequence[RankProfile] = field(repr=False)
    world_size: int | None
    ranks: Sequence[RankTime]
    costs: Sequence[CollectiveCost]
    features: Sequence[str]
    gain: Gain
    notes: Sequence[str]

    @property
    def mean(self) -> RankTime:
        """The times of a step, the means over the ranks."""
        return mean_time(self.ranks)

    @property
    def ours(self) -> bool:
        """Whether this package's layers stand in the profile."""
        return any(feature.name == OURS for feature, _ in features_in(self.profiles[0].seen))

    @property
    def verdict(self) -> str:
        """Say in a sentence what this package could hide, and how; or why there is nothing to gain."""
        if not self.costs and (self.world_size or 1) > 1:
            return (
                f"not known, because the profile is of {self.world_size} ranks and has no collective: record what the "
                "device does too (docs/audit.md)"
            )
        if not self.costs:
            return (
                "nothing to gain, because no collective is in the profile: it is of one card, or of ranks that share "
                "nothing"
            )
        exposed = self.mean.exposed
        share = self.gain.predicted / self.mean.step
        if share >= LEAST_SHARE:
            how = "this package's layers ran; in more chunks" if self.ours else "export COC_PARALLEL_NUM=auto:"
            return (
                f"{how} {self.gain.predicted:.2f} of {exposed:.2f} ms of exposed communication "
                f"could run under matmuls, {share:.0%} of a step, by the cost model in {self.gain.chunks} chunks; "
                f"{self.gain.bound:.2f} ms is the bound"
            )
        if self.gain.exchanges >= LEAST_SHARE * self.mean.step:
            return (
                f"export COC_PARALLEL_NUM=auto: {self.gain.exchanges:.2f} ms of a step are exposed exchanges of "
                "experts or heads, which run under their computation in groups; `ascend-parallel try` measures how "
                "much is hidden"
            )
        return f"nothing to gain, because {self._why(exposed)}"

    def _why(self, exposed: float) -> str:
        if exposed < LEAST_SHARE * self.mean.step:
            return f"{exposed:.2f} ms of a step of {self.mean.step:.2f} ms are exposed communication"
        if self.gain.host_bound:
            return (
                f"the device waits {self.mean.host or 0.0:.2f} ms of a step for the host, and chunks are further "
                "launches: graphs, larger micro-batches or fewer ranks help first"
            )
        largest = max(self.costs, key=lambda cost: cost.exposed)
        if largest.role.name == UNKNOWN:
            return (
                f"most exposed time is of a group of which the profile does not say what it is for: {largest.role.by}"
            )
        if largest.role.name in ADVICE:
            return f"most exposed time is of {largest.role.name}: {ADVICE[largest.role.name]}"
        return (
            f"chunks would save {self.gain.predicted:.2f} ms of {self.mean.step:.2f} ms by the cost model: matmuls "
            "beside the collectives are short"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; milliseconds and bytes of a step."""
        return {
            "world_size": self.world_size,
            "files": [str(profile.path) for profile in self.profiles],
            "device": self.profiles[0].device,
            "steps": self.profiles[0].step_count,
            "step_ms": self.mean.step,
            "host_ms": self.mean.host,
            "ranks": [asdict(rank) for rank in self.ranks],
            "collectives": [asdict(cost) for cost in self.costs],
            "features": list(self.features),
            "gain": asdict(self.gain),
            "verdict": self.verdict,
            "notes": list(self.notes),
        }

    def page(self) -> str:
        """Return the page: the lanes of one step of each rank, and the tables."""
        drawn = Picture("one step", _lanes(self.profiles), *_length_and_share(self.profiles))
        total = drawn.milliseconds or 1.0
        return render(
            TEMPLATE,
            audit=self,
            pictures=[drawn],
            total=total,
            ticks=ticks(total),
            colours=COLOURS,
            meaning=MEANING,
            notes=self.notes,
            heads=HEADS,
            rows=[cells(cost) for cost in self.costs],
        )


HEADS = ("for", "collective", "n", "size", "ms", "matmuls", "others", "exposed")
LEGEND = (
    "n: how many a step; size: what a rank puts into one; ms: when at least one runs; matmuls, others: the part beside "
    "a matmul, or other work alone; exposed: the rank computes nothing"
)
_SHORT = {FORWARD: " fwd", BACKWARD: " bwd", "": ""}


def cells(cost: CollectiveCost) -> tuple[str, ...]:
    """Return the cells of a row under `HEADS`."""
    size = "" if cost.nbytes is None else size_of(cost.nbytes).replace(" ", "")
    times = (cost.ms, cost.under_matmuls, cost.under_others, cost.exposed)
    name = cost.operation + _SHORT[cost.direction]
    return (cost.role.name, name, f"{cost.count:.3g}", size, *(f"{ms:.2f}" for ms in times))


def roles_in_words(costs: Sequence[CollectiveCost]) -> list[str]:
    """Say of each group what it is for, and by what that was told."""
    groups = dict.fromkeys((cost.group, cost.role) for cost in costs)
    return [
        f"{role.name}: {group.description or group.name or 'all collectives'}, by {role.by}"
        if role.name != UNKNOWN
        else f"{role.name}: {group.description or group.name or 'all collectives'}; {role.by}"
        for group, role in groups
    ]


def audit(places: Iterable[Path], progress: Callable[[str], None] = lambda _: None) -> Audit:
    """Read the profiles of a run and audit them; raises `ProfileError`.

    places
        Traces or folders: torch.profiler's (plain or gzip), Ascend's ``*_ascend_pt``, msprof's ``msprof_*.json``.
    """
    profiles = read_run(places, progress)
    ranks = [rank_time(profile) for profile in profiles]
    costs = collective_costs(profiles)
    sizes = [profile.world_size for profile in profiles if profile.world_size is not None]
    return Audit(
        profiles=profiles,
        world_size=sizes[0] if sizes else None,
        ranks=ranks,
        costs=costs,
        features=_features(profiles, costs),
        gain=gain(profiles, costs, ranks),
        notes=_notes(profiles, sizes[0] if sizes else None),
    )


def _features(profiles: Sequence[RankProfile], costs: Sequence[CollectiveCost]) -> list[str]:
    """Return which overlap ran, by what it was seen, and whether it did anything."""
    sentences = []
    communicated = sum(cost.ms for cost in costs if cost.role.name in (TENSOR, SEQUENCE))
    hidden = sum(cost.under_matmuls + cost.under_others for cost in costs if cost.role.name in (TENSOR, SEQUENCE))
    for feature, counts in features_in(profiles[0].seen):
        by = ", ".join(f"{clue} {count} times" for clue, count in counts.items())
        effect = "a matmul and its collective are one kernel, whose inside a profile does not show"
        if not feature.fused and communicated:
            effect = f"{hidden / communicated:.0%} of the layers' communication ran beside computation"
        elif not feature.fused:
            effect = "no collective of layers stands beside it"
        sentences.append(f"{feature.name} ran ({by}): {effect}")
    return sentences or ["no overlap that audit knows stands in the profile"]


def _notes(profiles: Sequence[RankProfile], world_size: int | None) -> list[str]:
    notes = [note for profile in profiles for note in profile.notes]
    if world_size is not None and world_size > len(profiles):
        notes.append(
            f"profiles of {len(profiles)} of {world_size} ranks: means are of these, and waiting for others is not "
            "told apart"
        )
    counts = {profile.step_count for profile in profiles}
    if len(counts) > 1:
        notes.append(f"the ranks have {', '.join(map(str, sorted(counts)))} steps: each is averaged over its own")
    if not any(profile.steps for profile in profiles):
        notes.append(
            "no step is marked (profile(schedule=...) and profiler.step()): the whole trace counts as one step"
        )
    offset = _offset(profiles)
    step = rank_time(profiles[0]).step if profiles[0].device == "cpu" else 0.0
    if offset is not None and offset > max(CLOCKS_MS, step):
        notes.append(
            f"clocks differ: the ends of the same collective lie {offset:.1f} ms apart; the picture moves the ranks "
            "together"
        )
    return notes


def _offset(profiles: Sequence[RankProfile]) -> float | None:
    """Return by how many ms the ends of the ranks' last collectives lie apart; None where they do not pair."""
    offsets = _shifts(profiles)
    return None if len(offsets) < 2 else (max(offsets) - min(offsets)) / 1e6


def _shifts(profiles: Sequence[RankProfile]) -> list[int]:
    """Return the offset of each rank's times, in ns, with which the collectives that all ranks have end together."""
    keys: list[dict[tuple[ProcessGroup, str], list[int]]] = []
    for profile in profiles:
        ends: dict[tuple[ProcessGroup, str], list[int]] = {}
        for one in profile.collectives:
            ends.setdefault((one.group, one.operation), []).append(one.end)
        keys.append(ends)
    for key, first in keys[0].items():
        lists = [of_rank.get(key, []) for of_rank in keys]
        if len({len(of_rank) for of_rank in lists}) == 1:
            return [median_low(ours - theirs for ours, theirs in zip(first, of_rank, strict=True)) for of_rank in lists]
    return []


def _window(profile: RankProfile) -> tuple[int, int]:
    """Return begin and end of the step to draw: the one of median length, moved to where its work runs on a device."""
    begin, end = profile.span
    if len(profile.steps) < 2:
        return begin, end
    lengths = [last - first for first, last in profile.steps]
    index = lengths.index(median_low(lengths))
    first, last = profile.steps[index]
    shift = 0 if profile.device == "cpu" else max(end - profile.steps[-1][1], 0)
    return first + shift, last + shift


def _lanes(profiles: Sequence[RankProfile]) -> list[RankLanes]:
    shifts = _shifts(profiles) or [0] * len(profiles)
    begin, end = _window(profiles[0])
    lanes = []
    for index, (profile, shift) in enumerate(zip(profiles[:MOST_LANES], shifts, strict=False)):
        window = [(begin - shift, end - shift)]
        gap = math.ceil(NEAR * (end - begin))
        drawn = RankLanes(index if profile.rank is None else profile.rank)
        matmuls = within(profile.busy(MATMUL), window)
        others = without(within(profile.busy(), window), matmuls)
        kinds = (("matmul", matmuls), ("beside", others))
        drawn.compute = [bar for kind, pieces in kinds for bar in _bars(kind, kind, pieces, window[0][0], gap)]
        for one in profile.collectives:
            pieces = within([(one.begin, one.end)], window)
            for kind, part in (
                ("hidden", within(pieces, profile.busy())),
                ("exposed", without(pieces, profile.busy())),
            ):
                drawn.comm += _bars(kind, one.operation, part, window[0][0], gap)
        lanes.append(drawn)
    return lanes


def _bars(kind: str, label: str, pieces: Sequence[tuple[int, int]], zero: int, gap: int) -> list[Bar]:
    """Return bars in ms; pieces that lie nearer than `gap` are joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in pieces:
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return [Bar(kind, label, (begin - zero) / 1e6, (end - zero) / 1e6) for begin, end in joined]


def _length_and_share(profiles: Sequence[RankProfile]) -> tuple[float, float | None]:
    begin, end = _window(profiles[0])
    communicating = within(union((one.begin, one.end) for one in profiles[0].collectives), [(begin, end)])
    bare = without(communicating, profiles[0].busy())
    total = sum(last - first for first, last in communicating)
    return (end - begin) / 1e6, sum(last - first for first, last in bare) / total if total else None
