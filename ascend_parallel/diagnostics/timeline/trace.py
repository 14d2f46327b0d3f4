"""Make a trace in Chrome's format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process with these tracks: the layers, with their computation and waits inside; one track for each
collective in flight; and one track of communication while the rank computes nothing.
Format: "Trace Event Format", complete events (``ph`` X) and metadata (``ph`` M), times in µs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile, Span
from ascend_parallel.diagnostics.timeline.table import exposed

LAYERS, EXPOSED, FIRST_COLLECTIVE = 1, 2, 3


def trace(files: Sequence[RankFile]) -> dict[str, Any]:
    """Return the trace of all ranks; `files` must have aligned clocks. Times count from the first pass."""
    zero = min((layer_pass.begin for file in files for layer_pass in file.passes), default=0)
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
    """Return a track for each span, in order: the first track that is free when the span begins."""
    free: list[int] = []
    numbers = []
    for span in spans:
        number = next((index for index, end in enumerate(free) if end <= span.begin), len(free))
        free[number:] = [span.end] if number == len(free) else [span.end, *free[number + 1 :]]
        numbers.append(number)
    return numbers


def label(span: Span) -> str:
    """Return a span's label; matmul chunks and collectives are numbered from 1."""
    numbered = span.kind == "comm" or span.name == "matmul"
    return f"{collective(span.name)} {span.index + 1}" if numbered else span.name


def collective(name: str) -> str:
    """Return the name of an operator's collective."""
    return {
        "matmul_all_reduce": "all-reduce",
        "matmul_reduce_scatter": "reduce-scatter",
        "all_gather_matmul": "all-gather",
        "all_gather": "all-gather",
    }.get(name, name)


def collectives(passes: Sequence[Pass]) -> list[tuple[Pass, Span]]:
    """Return every collective with its pass, ordered by begin."""
    pairs = [(layer_pass, span) for layer_pass in passes for span in layer_pass.spans if span.kind == "comm"]
    return sorted(pairs, key=lambda pair: pair[1].begin)


def _rank(file: RankFile, zero: int) -> Iterator[dict[str, Any]]:
    pid = file.rank

    def event(name: str, kind: str, track: int, begin: int, end: int, **args: Any) -> dict[str, Any]:
        times = {"ts": (begin - zero) / 1e3, "dur": (end - begin) / 1e3}
        return {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": track, **times, "args": args}

    names = {LAYERS: "layers: compute and wait", EXPOSED: "exposed communication"}
    for layer_pass in file.passes:
        about = {"group": list(layer_pass.group), "calls": list(layer_pass.calls), "finished": layer_pass.finished}
        yield event(
            f"{layer_pass.title} {layer_pass.direction}".strip(),
            "layer",
            LAYERS,
            layer_pass.begin,
            layer_pass.end,
            **about,
        )
        for span in layer_pass.spans:
            if span.kind != "comm":
                yield event(label(span), span.kind, LAYERS, span.begin, span.end)
        for begin, end in exposed(layer_pass):
            yield event("exposed", "exposed", EXPOSED, begin, end, layer=layer_pass.title)
    pairs = collectives(file.passes)
    for (layer_pass, span), track in zip(pairs, tracks([span for _, span in pairs]), strict=True):
        names[FIRST_COLLECTIVE + track] = f"communication {track + 1}"
        queued = (span.queued - zero) / 1e3
        about = {"layer": layer_pass.title, "handed over at µs": queued}
        yield event(label(span), "comm", FIRST_COLLECTIVE + track, span.begin, span.end, **about)
    yield _named("process_name", pid, 0, f"rank {file.rank} on {file.header['host']}")
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for track, name in names.items():
        yield _named("thread_name", pid, track, name)


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
