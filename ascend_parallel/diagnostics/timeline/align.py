"""One clock for the files of all ranks.

Ranks of one host share CLOCK_MONOTONIC; the difference that was measured must then be no larger than its error. Ranks
of other hosts are moved by what was measured, along the groups in which clocks were compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile, Span


@dataclass(frozen=True)
class Shift:
    """What to add to a rank's times, its largest error (None: not known), and how it was found; both in ns."""

    rank: int
    offset: int
    error: int | None
    how: str


def align(files: Sequence[RankFile]) -> tuple[list[RankFile], list[Shift]]:
    """Bring the times of all files to the clock of the first one's rank; return them and what was added."""
    first = files[0]
    shifts = {first.rank: Shift(first.rank, 0, 0, "the others are compared with it")}
    _follow_links(files, shifts)
    for file in files:
        if file.rank not in shifts:
            offset = _wall(first) - _wall(file)
            how = "never compared with the others: placed by the wall clock of its host"
            shifts[file.rank] = Shift(file.rank, offset, None, how)
    aligned = [
        RankFile(file.path, file.header, [_moved(one, shifts[file.rank].offset) for one in file.passes])
        for file in files
    ]
    return aligned, [shifts[file.rank] for file in files]


def _follow_links(files: Sequence[RankFile], shifts: dict[int, Shift]) -> None:
    """Reach as many ranks as there are ways to: in each round those next to a rank that was reached."""
    headers = {file.rank: file.header for file in files}
    links = [(rank, known) for rank, header in headers.items() for known in header["clocks"] if known["to"] != rank]
    reached = 0
    while reached != len(shifts):
        reached = len(shifts)
        for rank, link in links:
            other = link["to"]
            offset, error, how = _difference(headers[rank], headers.get(other), link)
            if other in shifts and rank not in shifts:
                shifts[rank] = _step(rank, shifts[other], offset, error, how)
            elif rank in shifts and other not in shifts and other in headers:
                shifts[other] = _step(other, shifts[rank], -offset, error, how)
        for rank, header in headers.items():
            near = next((shifts[r] for r, h in headers.items() if r in shifts and _one_host(h, header)), None)
            if rank not in shifts and near is not None:
                shifts[rank] = _step(rank, near, 0, 0, f"one host with rank {near.rank}, not compared")


def _difference(header: dict[str, Any], other: dict[str, Any] | None, link: dict[str, Any]) -> tuple[int, int, str]:
    """Return offset, error and how they were found, of a rank against the one it asked."""
    offset, error = link["offset"], link["error"]
    measured = f"{offset / 1e3:+.0f} ± {error / 1e3:.0f} µs measured"
    if other is None or not _one_host(header, other):
        return offset, error, measured
    if abs(offset) <= error:
        return 0, 0, f"one host, one clock ({measured})"
    return offset, error, f"one host, but {measured}: its clock is another, and was moved"


def _step(rank: int, via: Shift, offset: int, error: int, how: str) -> Shift:
    return Shift(rank, via.offset + offset, None if via.error is None else via.error + error, how)


def _one_host(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["boot"]) and one["boot"] == other["boot"]


def _wall(file: RankFile) -> int:
    """What a rank's clock is behind its host's wall clock."""
    now = file.header["now"]
    return int(now["monotonic"]) - int(now["wall"])


def _moved(one: Pass, offset: int) -> Pass:
    spans = tuple(_moved_span(span, offset) for span in one.spans)
    return replace(one, begin=one.begin + offset, end=one.end + offset, spans=spans)


def _moved_span(span: Span, offset: int) -> Span:
    return replace(span, queued=span.queued + offset, begin=span.begin + offset, end=span.end + offset)
