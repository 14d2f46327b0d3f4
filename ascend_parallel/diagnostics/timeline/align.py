"""Measure the clock differences between ranks, and convert the times of all ranks' files to one clock.

CLOCK_MONOTONIC counts from the boot of a host, so ranks of two hosts have different zeros. Each rank asks its group's
first rank for its time through the group's store, ROUNDS times. The fastest answer counts, and half of its round trip
is the largest possible error of the difference.

Ranks of one host share the clock, so a measured difference should not exceed its error there. Ranks of other hosts are
shifted by the measured differences, along the groups whose ranks compared clocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile
from ascend_parallel.process_groups import time_limit
from ascend_parallel.process_groups.consistency import absence, store_all_gather
from ascend_parallel.process_groups.rendezvous import Rendezvous

ROUNDS = 10
TOPIC, PLACE = "clocks", "the comparison of clocks for a timeline"
ABSENT = "it has stopped, or does not record (record on every rank, or export COC_TIMELINE on every rank)"


class ClockError(RuntimeError):
    """A rank of a group does not take part in the clock comparison; the message names the rank."""


@dataclass(frozen=True)
class Difference:
    """The offset from this rank's clock to that of rank `to`, and its largest error; both in ns."""

    to: int
    offset: int
    error: int


def compare(group: dist.ProcessGroup) -> Difference | None:
    """Return this rank's clock difference to the first rank of `group`; None for the backend "fake".

    Every rank of the group must call this function. Raises `ClockError` on every rank that does, after the time limit
    of the group or of its store.
    """
    if dist.get_backend(group) == "fake":
        return None
    # a rank that does not record is named here
    store_all_gather(group, PLACE, {}, ClockError, topic=TOPIC, hint=ABSENT)
    clocks = Rendezvous(group, TOPIC)
    clocks.forget_earlier()
    first, *others = clocks.ranks
    if clocks.rank != first:
        return _ask(clocks, first, group)
    for rank in others:
        for number in range(ROUNDS):
            _answer(clocks, f"question {number}", rank, group)
            clocks.publish(f"answer {number} to rank {rank}", str(time.monotonic_ns()))
    return Difference(first, 0, 0)


def _ask(clocks: Rendezvous, first: int, group: dist.ProcessGroup) -> Difference:
    answers = []
    for number in range(ROUNDS):
        before = time.monotonic_ns()
        clocks.publish(f"question {number}", "")
        theirs = int(_answer(clocks, f"answer {number} to rank {clocks.rank}", first, group))
        after = time.monotonic_ns()
        answers.append(((after - before + 1) // 2, theirs - (before + after) // 2))
    error, offset = min(answers)
    return Difference(first, offset, error)


def _answer(clocks: Rendezvous, name: str, rank: int, group: dist.ProcessGroup) -> str:
    limit = time_limit(group)
    text = clocks.answer(name, rank, limit)
    if text is None:
        raise ClockError(absence(group, PLACE, [rank], limit.total_seconds(), ABSENT))
    return text


def boot_id() -> str:
    """Return the host's boot id, which is unique for each boot; empty where the system has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


@dataclass(frozen=True)
class Shift:
    """The offset added to a rank's times and its largest error (None: unknown), in ns, and how it was found."""

    rank: int
    offset: int
    error: int | None
    how: str


def align(files: Sequence[RankFile]) -> tuple[list[RankFile], list[Shift]]:
    """Convert all times to the clock of the first file's rank; return the files and the shifts."""
    first = files[0]
    shifts = {first.rank: Shift(first.rank, 0, 0, "the others are compared with it")}
    _follow_links(files, shifts)
    for file in files:
        if file.rank not in shifts:
            offset = _wall(first) - _wall(file)
            how = "never compared with the others: placed by the wall clock of its host"
            shifts[file.rank] = Shift(file.rank, offset, None, how)
    aligned = [
        RankFile(file.path, file.header, [_moved(layer_pass, shifts[file.rank].offset) for layer_pass in file.passes])
        for file in files
    ]
    return aligned, [shifts[file.rank] for file in files]


def _follow_links(files: Sequence[RankFile], shifts: dict[int, Shift]) -> None:
    """Fill `shifts` for every rank that a chain of clock comparisons, or a common host, connects to the first rank."""
    headers = {file.rank: file.header for file in files}
    links = [(rank, link) for rank, header in headers.items() for link in header["clocks"] if link["to"] != rank]
    reached = 0
    while reached != len(shifts):
        reached = len(shifts)
        for rank, link in links:
            peer = link["to"]
            offset, error, how = _difference(headers[rank], headers.get(peer), link)
            if peer in shifts and rank not in shifts:
                shifts[rank] = _chained(rank, shifts[peer], offset, error, how)
            elif rank in shifts and peer not in shifts and peer in headers:
                shifts[peer] = _chained(peer, shifts[rank], -offset, error, how)
        for rank, header in headers.items():
            near = next((shifts[r] for r, h in headers.items() if r in shifts and _one_host(h, header)), None)
            if rank not in shifts and near is not None:
                shifts[rank] = _chained(rank, near, 0, 0, f"one host with rank {near.rank}, not compared")


def _difference(header: dict[str, Any], peer: dict[str, Any] | None, link: dict[str, Any]) -> tuple[int, int, str]:
    """Return offset and error of a rank against the peer of its `link`, and how they were found."""
    offset, error = link["offset"], link["error"]
    measured = f"{offset / 1e3:+.0f} ± {error / 1e3:.0f} µs measured"
    if peer is None or not _one_host(header, peer):
        return offset, error, measured
    if abs(offset) <= error:
        return 0, 0, f"one host, one clock ({measured})"
    return offset, error, f"one host, but {measured}: it has another clock, and was shifted"


def _chained(rank: int, peer: Shift, offset: int, error: int, how: str) -> Shift:
    return Shift(rank, peer.offset + offset, None if peer.error is None else peer.error + error, how)


def _one_host(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return bool(first["boot"]) and first["boot"] == second["boot"]


def _wall(file: RankFile) -> int:
    """Return a rank's monotonic clock minus its host's wall clock, in ns."""
    now = file.header["now"]
    return int(now["monotonic"]) - int(now["wall"])


def _moved(original: Pass, offset: int) -> Pass:
    spans = tuple(
        replace(span, queued=span.queued + offset, begin=span.begin + offset, end=span.end + offset)
        for span in original.spans
    )
    return replace(original, begin=original.begin + offset, end=original.end + offset, spans=spans)
