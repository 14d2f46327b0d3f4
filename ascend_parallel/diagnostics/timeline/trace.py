"""A trace in Chrome's format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process per rank: a track of layers with what they compute and wait for inside, one track for each
collective that runs at a time, and one that shows communication while the rank computes nothing.
Format: "Trace Event Format", complete events (``ph`` X) and metadata (``ph`` M), times in µs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile, Span
from ascend_parallel.diagnostics.timeline.table import exposed

LAYERS, EXPOSED, FIRST_COLLECTIVE = 1, 2, 3


def trace(files: Sequence[RankFile]) -> dict[str, Any]:
    """Return the trace of all ranks, whose clocks are aligned; times count from the first pass."""
    zero = min((one.begin for file in files for one in file.passes), default=0)
    events: list[dict[str, Any]] = []
    for file in files:
        events += _rank(file, zero)
    header = files[0].header
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": header["run"], "ranks": header["ranks"], **header["versions"]},
    }


def tracks(spans: Sequence[Span]) -> list[int]:
    """Give each span, in their order, the first track that is free when it begins."""
    free: list[int] = []
    found = []
    for span in spans:
        number = next((index for index, end in enumerate(free) if end <= span.begin), len(free))
        free[number:] = [span.end] if number == len(free) else [span.end, *free[number + 1 :]]
        found.append(number)
    return found


def label(span: Span) -> str:
    """Name a span: chunks of a matmul and collectives bear their number, from 1."""
    numbered = span.kind == "comm" or span.name == "matmul"
    return f"{collective(span.name)} {span.index + 1}" if numbered else span.name


def collective(name: str) -> str:
    """Name what communicates in an operator."""
    return {
        "matmul_all_reduce": "all-reduce",
        "matmul_reduce_scatter": "reduce-scatter",
        "all_gather_matmul": "all-gather",
        "all_gather": "all-gather",
    }.get(name, name)


def collectives(passes: Sequence[Pass]) -> list[tuple[Pass, Span]]:
    """Return every collective in the order in which they begin."""
    found = [(one, span) for one in passes for span in one.spans if span.kind == "comm"]
    return sorted(found, key=lambda both: both[1].begin)


def _rank(file: RankFile, zero: int) -> Iterator[dict[str, Any]]:
    pid = file.rank

    def event(name: str, kind: str, track: int, begin: int, end: int, **args: Any) -> dict[str, Any]:
        times = {"ts": (begin - zero) / 1e3, "dur": (end - begin) / 1e3}
        return {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": track, **times, "args": args}

    names = {LAYERS: "layers: compute and wait", EXPOSED: "exposed communication"}
    for one in file.passes:
        about = {"group": list(one.group), "calls": list(one.calls), "finished": one.finished}
        yield event(f"{one.title} {one.direction}".strip(), "layer", LAYERS, one.begin, one.end, **about)
        for span in one.spans:
            if span.kind != "comm":
                yield event(label(span), span.kind, LAYERS, span.begin, span.end)
        for begin, end in exposed(one):
            yield event("exposed", "exposed", EXPOSED, begin, end, layer=one.title)
    both = collectives(file.passes)
    for (one, span), track in zip(both, tracks([span for _, span in both]), strict=True):
        names[FIRST_COLLECTIVE + track] = f"communication {track + 1}"
        queued = (span.queued - zero) / 1e3
        about = {"layer": one.title, "handed over at µs": queued}
        yield event(label(span), "comm", FIRST_COLLECTIVE + track, span.begin, span.end, **about)
    yield _named("process_name", pid, 0, f"rank {file.rank} on {file.header['host']}")
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for track, name in names.items():
        yield _named("thread_name", pid, track, name)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
