"""Find the traces of a run in files and folders, and read what Ascend's folders say beside them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ascend_parallel.diagnostics.audit.events import ProfileError, read_json
from ascend_parallel.diagnostics.audit.profile import Collective, ProcessGroup, RankProfile, read_profile
from ascend_parallel.diagnostics.audit.roles import CLUES
from ascend_parallel.diagnostics.intervals import length, union, without

# In this order: a folder of Ascend's profiler has one trace beside other JSON files.
PATTERNS = (("trace_view.json",), ("msprof_*.json",), ("*.json", "*.json.gz"))
# Sums that differ by more than this share from Ascend's own are said.
CLOSE = 0.01
_RANK = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


def find_traces(places: Iterable[Path]) -> list[Path]:
    """Return the traces of files, and of folders with all below them; raises `ProfileError` where there is none."""
    traces: list[Path] = []
    for place in places:
        if place.is_file():
            traces.append(place)
        elif place.is_dir():
            found = (sorted(path for pattern in patterns for path in place.rglob(pattern)) for patterns in PATTERNS)
            in_place = next(filter(None, found), [])
            if not in_place:
                raise ProfileError(f"{place}: no trace in it; a trace is {', '.join(sum(PATTERNS, ()))}")
            traces += in_place
        else:
            raise ProfileError(f"{place}: no such file or folder")
    return list(dict.fromkeys(traces))


def read_run(places: Iterable[Path], progress: Callable[[str], None] = lambda _: None) -> list[RankProfile]:
    """Return the profiles of a run, by rank; raises `ProfileError` for files that do not belong together."""
    traces = find_traces(places)
    profiles = []
    for index, path in enumerate(traces):
        progress(f"reading {path.name} ({index + 1} of {len(traces)})")
        profile = read_profile(path, CLUES, progress)
        profile.rank = _rank(profile) if profile.rank is None else profile.rank
        _read_beside(profile)
        profiles.append(profile)
    _check(profiles)
    return sorted(profiles, key=lambda profile: (profile.rank is None, profile.rank))


def _rank(profile: RankProfile) -> int | None:
    """Return the rank by Ascend's ``profiler_info_<rank>.json``, or by the names of the file and its folders."""
    for folder in list(profile.path.parents)[:2]:
        for information in folder.glob("profiler_info_*.json"):
            number = information.stem.rpartition("_")[2]
            if number.isdigit():
                return int(number)
    match = _RANK.search(profile.path.name) or _RANK.search(profile.path.parent.name)
    return int(match[1]) if match else None


def _check(profiles: Sequence[RankProfile]) -> None:
    """Refuse files of different runs, and note missing ranks."""
    by_rank: dict[int, Path] = {}
    for profile in profiles:
        if profile.rank is not None and profile.rank in by_rank:
            raise ProfileError(
                f"{profile.path} and {by_rank[profile.rank]} are both of rank {profile.rank}: give the files of one run"
            )
        if profile.rank is not None:
            by_rank[profile.rank] = profile.path
    sizes = {profile.world_size for profile in profiles if profile.world_size is not None}
    if len(sizes) > 1:
        named = " and ".join(map(str, sorted(sizes)))
        raise ProfileError(f"the profiles are of runs of {named} ranks: give the files of one run")
    devices = {profile.device for profile in profiles}
    if len(devices) > 1:
        raise ProfileError(f"the profiles are of {' and '.join(sorted(devices))}: give the files of one run")


def _read_beside(profile: RankProfile) -> None:
    """Name the groups, and compare the sums, by the files that Ascend's profiler writes beside a trace."""
    folder = profile.path.parent
    for metadata in (folder / "profiler_metadata.json", folder.parent / "profiler_metadata.json"):
        if metadata.is_file():
            profile.collectives = _named(profile.collectives, read_json(metadata).get("parallel_group_info") or {})
            break
    if (folder / "step_trace_time.csv").is_file():
        profile.notes += _compared(profile, folder / "step_trace_time.csv")


def _named(collectives: Sequence[Collective], groups: object) -> list[Collective]:
    """Return the collectives with the names and ranks of their groups, by Ascend's list of communicators."""
    if not isinstance(groups, dict):
        return list(collectives)
    renamed: dict[ProcessGroup, ProcessGroup] = {}
    for one in collectives:
        entry = next((entry for key, entry in groups.items() if _one_name(str(key), one.group.name)), None)
        if one.group.name and isinstance(entry, dict):
            ranks = tuple(int(rank) for rank in entry.get("global_ranks") or ())
            renamed[one.group] = ProcessGroup(one.group.name, str(entry.get("group_name", "")), ranks, len(ranks))
    return [replace(one, group=renamed.get(one.group, one.group)) for one in collectives]


def _one_name(key: str, name: str) -> bool:
    """Tell whether one stands in the other as a word: "Group 0" and "0" are one, "group_1" and "group_12" are two."""
    short, long = sorted((key, name), key=len)
    return bool(re.search(rf"(?<![\w.%]){re.escape(short)}(?![\w.%])", long))


def _compared(profile: RankProfile, table: Path) -> list[str]:
    """Return a note if Ascend's own sums of communication differ from those of the trace."""
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    communicating = union((one.begin, one.end) for one in profile.collectives)
    sums = {
        "Communication": length(communicating) / 1e3,
        "Communication(Not Overlapped)": length(without(communicating, profile.busy())) / 1e3,
    }
    notes = []
    for column, here in sums.items():
        try:
            theirs = sum(float(row[column]) for row in rows)
        except (KeyError, TypeError, ValueError):
            return [f"{table.name}: no column {column!r} of numbers; its sums were not compared"]
        if abs(theirs - here) > CLOSE * max(theirs, here, 1.0):
            notes.append(
                f"{table.name} has {theirs / 1e3:.2f} ms of {column}, the trace {here / 1e3:.2f} ms: "
                "they are of different steps"
            )
    return notes
