"""Add up a rank's time: each group's collectives, what ran beside them, what was exposed, what waited for the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from ascend_parallel.diagnostics.audit.profile import MATMUL, Collective, Kernel, ProcessGroup, RankProfile, idle
from ascend_parallel.diagnostics.audit.roles import Role, role_of
from ascend_parallel.diagnostics.intervals import length, union, within, without

MS = 1e6  # nanoseconds


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """What the collectives of one group, operation and direction cost a step, in ms: means over the ranks.

    group
        The group; of groups that are one dimension of the run on different ranks, the first.
    ms
        The time in which at least one of them ran.
    under_matmuls, under_others
        The parts of it in which a matmul, or another computation alone, ran on the same rank.
    exposed
        The rest: the rank computed nothing.
    waiting
        Time of the collectives beyond the shortest rank's: other ranks came late, or the link is uneven. None for a
        single rank.
    nbytes
        Bytes that a rank puts into one, the median; None where the profile does not say.
    """

    group: ProcessGroup
    role: Role
    operation: str
    direction: str
    count: float
    nbytes: float | None
    ms: float
    under_matmuls: float
    under_others: float
    exposed: float
    waiting: float | None


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """A rank's step in ms: computation, communication and what is exposed of it, and idle time of the device.

    host
        The part of `idle` before the launch of what ran next: the device waited for Python. None where the profile
        has no launches.
    """

    rank: int | None
    step: float
    matmul: float
    computing: float
    communicating: float
    exposed: float
    idle: float
    host: float | None

    def in_words(self) -> str:
        """Return the parts of the step."""
        host = "" if self.host is None else f", {self.host:.2f} waiting for the host"
        return (
            f"matmuls {self.matmul:.2f}, other work {self.computing - self.matmul:.2f}, exposed communication "
            f"{self.exposed:.2f}, idle {self.idle:.2f} ms{host}"
        )


def mean_time(ranks: Sequence[RankTime]) -> RankTime:
    """Return the mean times over the ranks."""
    hosts = [rank.host for rank in ranks if rank.host is not None]
    return RankTime(
        rank=None,
        step=mean(rank.step for rank in ranks),
        matmul=mean(rank.matmul for rank in ranks),
        computing=mean(rank.computing for rank in ranks),
        communicating=mean(rank.communicating for rank in ranks),
        exposed=mean(rank.exposed for rank in ranks),
        idle=mean(rank.idle for rank in ranks),
        host=mean(hosts) if hosts else None,
    )


Key = tuple[ProcessGroup, str, str]


def rank_time(profile: RankProfile) -> RankTime:
    """Return the times of a rank's step: the profile's sums by its number of steps."""
    computing = profile.busy()
    communicating = union((one.begin, one.end) for one in profile.collectives)
    steps = MS * profile.step_count
    nothing = idle(profile)
    begin, end = profile.span
    return RankTime(
        rank=profile.rank,
        step=(end - begin) / steps,
        matmul=length(profile.busy(MATMUL)) / steps,
        computing=length(computing) / steps,
        communicating=length(communicating) / steps,
        exposed=length(without(communicating, computing)) / steps,
        idle=length(nothing) / steps,
        host=_host_time(profile, nothing),
    )


def _host_time(profile: RankProfile, nothing: Sequence[tuple[int, int]]) -> float | None:
    """Return the ms of a step in which the device had nothing because the host had not launched it yet."""
    if profile.device == "cpu":  # the host is the device: what is idle is Python
        return length(list(nothing)) / MS / profile.step_count
    events: list[Kernel | Collective] = [*profile.kernels, *profile.collectives]
    launched: dict[int, int] = {}
    for one in events:
        if one.launched is not None:
            launched[one.begin] = min(one.launched, launched.get(one.begin, one.launched))
    if not launched:
        return None
    late = sum(max(min(launched.get(end, begin), end) - begin, 0) for begin, end in nothing)
    return late / MS / profile.step_count


def collective_costs(profiles: Sequence[RankProfile]) -> list[CollectiveCost]:
    """Return the costs of each group's operations by direction, the most exposed first."""
    roles = group_roles(profiles)
    first = _dimensions(roles)
    by_rank = [_by_key(profile, first) for profile in profiles]
    waits = _waiting(profiles, first)
    costs = []
    for key in dict.fromkeys(key for keys in by_rank for key in keys):
        group, operation, direction = key
        parts = [_parts(profile, keys.get(key, [])) for profile, keys in zip(profiles, by_rank, strict=True)]
        sizes = [one.nbytes for keys in by_rank for one in keys.get(key, []) if one.nbytes is not None]
        counts = [len(keys.get(key, [])) / profile.step_count for profile, keys in zip(profiles, by_rank, strict=True)]
        costs.append(
            CollectiveCost(
                group=group,
                role=roles[group],
                operation=operation,
                direction=direction,
                count=mean(counts),
                nbytes=median(sizes) if sizes else None,
                ms=mean(part[0] for part in parts),
                under_matmuls=mean(part[1] for part in parts),
                under_others=mean(part[2] for part in parts),
                exposed=mean(part[3] for part in parts),
                waiting=waits.get(key),
            )
        )
    return sorted(costs, key=lambda cost: -cost.exposed)


def _by_key(profile: RankProfile, first: Mapping[ProcessGroup, ProcessGroup]) -> dict[Key, list[Collective]]:
    keys: dict[Key, list[Collective]] = defaultdict(list)
    for one in profile.collectives:
        keys[first.get(one.group, one.group), one.operation, one.direction].append(one)
    return dict(keys)


def group_roles(profiles: Sequence[RankProfile]) -> dict[ProcessGroup, Role]:
    """Return the purpose of each group of the profiles."""
    members: dict[ProcessGroup, list[Collective]] = defaultdict(list)
    for profile in profiles:
        for one in profile.collectives:
            members[one.group].append(one)
    return {group: role_of(group, collectives) for group, collectives in members.items()}


def _dimensions(roles: Mapping[ProcessGroup, Role]) -> dict[ProcessGroup, ProcessGroup]:
    """Return for each group the first of its dimension: of the tensor groups of ranks 0, 1 and of 2, 3 that of 0, 1."""
    families: dict[tuple[str, str, int], list[list[ProcessGroup]]] = defaultdict(list)
    for group, role in roles.items():
        alike = families[role.name, group.description, group.size]
        family = next((others for others in alike if _apart(group, others)), None)
        if family is None:
            alike.append([group])
        else:
            family.append(group)
    return {group: family[0] for alike in families.values() for family in alike for group in family}


def _apart(group: ProcessGroup, others: Sequence[ProcessGroup]) -> bool:
    """Tell whether the group's ranks are known and in none of the others."""
    return bool(group.ranks) and all(other.ranks and set(group.ranks).isdisjoint(other.ranks) for other in others)


def _parts(profile: RankProfile, collectives: Sequence[Collective]) -> tuple[float, float, float, float]:
    """Return ms of a step: of the collectives, under matmuls, under other computation alone, exposed."""
    running = union((one.begin, one.end) for one in collectives)
    steps = MS * profile.step_count
    under, hidden = length(within(running, profile.busy(MATMUL))), length(within(running, profile.busy()))
    return length(running) / steps, under / steps, (hidden - under) / steps, (length(running) - hidden) / steps


def _waiting(profiles: Sequence[RankProfile], first: Mapping[ProcessGroup, ProcessGroup]) -> dict[Key, float]:
    """Return the mean ms of a step beyond a group's shortest rank, of collectives that its ranks have alike."""
    by_rank = [_by_key(profile, {}) for profile in profiles]
    beyond: dict[Key, list[float]] = defaultdict(list)
    for key in dict.fromkeys(key for keys in by_rank for key in keys):
        durations = [[one.end - one.begin for one in keys[key]] for keys in by_rank if key in keys]
        if len(durations) > 1 and len({len(of_rank) for of_rank in durations}) == 1:
            shortest = sum(min(column) for column in zip(*durations, strict=True))
            group, operation, direction = key
            beyond[first[group], operation, direction] += [sum(of_rank) - shortest for of_rank in durations]
    return {key: mean(of_ranks) / MS / profiles[0].step_count for key, of_ranks in beyond.items()}
