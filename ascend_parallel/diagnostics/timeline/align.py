"""Convert the times of all ranks' files to one clock.

Ranks of one host share CLOCK_MONOTONIC, so a measured difference should not exceed its error there. Ranks of other
hosts are shifted by the measured differences, along the groups whose ranks compared clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile


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
