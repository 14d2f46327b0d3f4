"""Write and read the file of each rank: JSON lines, a header and then one pass per line. All times are in ns.

    {"format": "ascend_parallel timeline", "version": 1, "run": ..., "rank": 0, "ranks": 2, ...}
    {"layer": "mlp.linear_fc2", "kind": "row", "direction": "forward", "group": [0, 1], "begin": ..., "end": ...,
     "calls": [{"operator": "matmul_all_reduce", "m": ..., ...}],
     "spans": [[kind, name, index, begin, end, workers], ...]}

Times are those of the rank's own clock. A null end means that the span had not ended when the file was written.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ascend_parallel.settings import SettingsError
from ascend_parallel.text import replace_text, shown, some_of

FORMAT, VERSION = "ascend_parallel timeline", 1
PATTERN = "timeline-*-rank*.jsonl"
MOST_LISTED = 64
SPAN_KINDS = ("matmul", "beside", "comm", "wait", "fused", "clocks")
COMPUTING = ("matmul", "beside", "fused")


MOST_RANKS, MOST_WORKERS = 1 << 20, 4096
MOST = 1 << 63  # bound for times in ns and for counts


class TimelineError(ValueError):
    """A folder or file from which no timeline can be made; the message says what is wrong."""


@dataclass(frozen=True)
class Span:
    """Work in ns; `queued` is when a collective was issued, `begin` the earliest time at which it can have begun."""

    kind: str
    name: str
    index: int
    queued: int
    begin: int
    end: int


@dataclass(frozen=True)
class Pass:
    """One forward or backward of a layer, or one direct call of an operator; unfinished if a span has no end.

    elsewhere
        When the rank computed in other passes while collectives of this pass ran, or it waited for them: in a region
        they run on under the next layers.
    """

    layer: str
    kind: str
    direction: str
    group: tuple[int, ...]
    begin: int
    end: int
    calls: tuple[dict[str, Any], ...]
    spans: tuple[Span, ...]
    finished: bool
    elsewhere: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The key that groups the passes of a layer: its name or shape, and the direction."""
        return self.title, self.direction

    @property
    def title(self) -> str:
        """The layer's name, or its kind and the shape of its matmul."""
        if self.layer:
            return self.layer
        shape = [self.calls[0][side] for side in "mkn"] if self.calls else ""
        return f"{self.kind} {shape}".strip()


@dataclass
class RankFile:
    """The record of one rank."""

    path: Path
    header: dict[str, Any]
    passes: list[Pass] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return int(self.header["rank"])


def _is_text(value: object) -> bool:
    """Tell whether a value is a text that UTF-8 can encode: JSON also allows lone surrogates."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_clock(value: object) -> bool:
    """Tell whether a value is a clock difference: a dict of the rank `to`, `offset` and `error`."""
    names = ("to", "offset", "error")
    fits = isinstance(value, dict) and all(type(value.get(name)) is int and abs(value[name]) < MOST for name in names)
    return fits and isinstance(value, dict) and value["error"] >= 0


HEADER: dict[str, Callable[[Any], bool]] = {
    "run": _is_text,
    "rank": _is_count,
    "ranks": lambda value: _is_count(value) and 0 < value <= MOST_RANKS,
    "passes": _is_count,
    "host": _is_text,
    "boot": _is_text,
    "clocks": lambda value: isinstance(value, list) and all(map(_is_clock, value)),
    "now": lambda value: isinstance(value, dict) and all(_is_count(value.get(key)) for key in ("monotonic", "wall")),
    "versions": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
}


def write(folder: Path, header: dict[str, Any], passes: Iterable[dict[str, Any]]) -> Path:
    """Write one rank's file atomically and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"timeline-{header['run']}-rank{header['rank']}.jsonl"
    lines = [{"format": FORMAT, "version": VERSION, **header}, *passes]
    replace_text(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


def require_writable(folder: str | Path, option: str = "COC_TIMELINE") -> None:
    """Raise `SettingsError` with the option unless files can be written to a folder, or to its nearest parent."""
    nearest = Path(folder)
    try:
        if "\0" in str(folder):
            raise ValueError("a path cannot have a null byte")
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b" " * 4096)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"{option}={shown(str(folder))} cannot be written to ({why}): give a writable folder"
        ) from error


def read_run(folder: Path, run: str | None = None) -> tuple[list[RankFile], list[str]]:
    """Return the files of one run in rank order, and notes for the user; `run` None means the latest run.

    Raises `TimelineError` if there is no file, or if a file is damaged or of another format.
    """
    if not folder.is_dir():
        what = "that is a file" if folder.exists() else "no such folder"
        raise TimelineError(f"{folder}: {what}; give the folder that COC_TIMELINE named")
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise TimelineError(
            f"{folder}: no timeline-*-rank*.jsonl in it; run with COC_TIMELINE={folder}, and wait for the end of the "
            "run, which writes the files"
        )
    headers = {path: _read_header(path) for path in paths}
    runs = sorted({header["run"] for header in headers.values()})
    chosen = runs[-1] if run is None else run
    if chosen not in runs:
        raise TimelineError(f"{folder} has no run {chosen!r}; it has {', '.join(runs)}")
    files = sorted((_read(path) for path in paths if headers[path]["run"] == chosen), key=lambda file: file.rank)
    for before, file in pairwise(files):
        if before.rank == file.rank:
            raise TimelineError(f"{before.path} and {file.path} are both of rank {file.rank} of the same run")
    if len({file.header["ranks"] for file in files}) > 1:
        raise TimelineError(f"{folder}: the files of run {chosen} have different numbers of ranks")
    notes = [f"{folder} has other runs too: {', '.join(set(runs) - {chosen})} (--run)"] if len(runs) > 1 else []
    return files, [*_missing(files), *_dropped(files), *notes]


def _missing(files: Sequence[RankFile]) -> list[str]:
    known = {file.rank for file in files}
    lacking = [rank for rank in range(files[0].header["ranks"]) if rank not in known]
    if not lacking:
        return []
    return [
        f"of {files[0].header['ranks']} ranks, the files of rank {some_of(lacking, MOST_LISTED)} are missing: these "
        "ranks ended without writing a file, recorded nothing, or wrote it on another host"
    ]


def _dropped(files: Sequence[RankFile]) -> list[str]:
    """Return a note for each rank that dropped its earliest passes."""
    return [
        f"rank {file.rank} kept its last {len(file.passes)} of {file.header['passes']} passes (timeline_passes)"
        for file in files
        if file.header["passes"] > len(file.passes)
    ]


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            header = json.loads(lines.readline())
    except (OSError, ValueError, RecursionError) as error:
        raise TimelineError(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TimelineError(f"{path} is not a file of an ascend_parallel timeline")
    if header.get("version") != VERSION:
        raise TimelineError(f"{path} has version {header.get('version')!r} of the format; this package reads {VERSION}")
    for name, fits in HEADER.items():
        if not fits(header.get(name)):
            raise TimelineError(f"{path}, line 1, is damaged: {name}={shown(header.get(name))}")
    if header["rank"] >= header["ranks"]:
        raise TimelineError(f"{path}, line 1, is damaged: rank {header['rank']} of {header['ranks']}")
    return header


def _read(path: Path) -> RankFile:
    file = RankFile(path, _read_header(path))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise TimelineError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines[1:], start=2):
        try:
            if line:
                file.passes.append(_pass(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise TimelineError(f"{path}, line {number}, is damaged ({reason}); move the file away") from error
    file.passes = _with_computation_elsewhere(file.passes)
    return file


def _with_computation_elsewhere(passes: Sequence[Pass]) -> list[Pass]:
    computed = sorted((s.begin, s.end, place) for place, p in enumerate(passes) for s in p.spans if s.kind in COMPUTING)
    reached = list(accumulate((end for _, end, _ in computed), max))
    found = []
    for place, layer_pass in enumerate(passes):
        open_spans = [span for span in layer_pass.spans if span.kind in ("comm", "wait")]
        if not open_spans:
            found.append(layer_pass)
            continue
        first = bisect_right(reached, min(span.begin for span in open_spans))
        last = bisect_left(computed, (max(span.end for span in open_spans),))
        others = tuple((begin, end) for begin, end, of in computed[first:last] if of != place)
        found.append(replace(layer_pass, elsewhere=others))
    return found


def _pass(line: dict[str, Any]) -> Pass:
    _check(line)
    ends = [line["end"], *(end for *_, end, _ in line["spans"])]
    last = max(end for end in [line["begin"], *(begin for *_, begin, _, _ in line["spans"]), *ends] if end is not None)
    raw = [(*head, begin, last if end is None else end, workers) for *head, begin, end, workers in line["spans"]]
    if any(kind not in SPAN_KINDS or not begin <= end for kind, _, _, begin, end, _ in raw):
        raise ValueError("a span has an unknown kind, or ends before it begins")
    finished = None not in ends
    spans = _begun(raw)
    head = (line["layer"], line["kind"], line["direction"], tuple(line["group"]))
    return Pass(*head, line["begin"], last, tuple(line["calls"]), spans, finished)


def _check(line: dict[str, Any]) -> None:
    """Raise `ValueError` unless a pass, its calls and its spans have the types that `write` gives them."""
    texts = [line["layer"], line["kind"], line["direction"], *(name for _, name, *_ in line["spans"])]
    texts += [call[key] for call in line["calls"] for key in ("operator", "kernel")]
    sizes = [*line["group"], *(call[key] for call in line["calls"] for key in ("m", "k", "n", "chunks"))]
    sizes += [number for _, _, index, _, _, workers in line["spans"] for number in (index, workers)]
    times = [line["begin"], *(begin for _, _, _, begin, _, _ in line["spans"])]
    ends = [line["end"], *(end for _, _, _, _, end, _ in line["spans"])]
    if not all(map(_is_text, texts)):
        raise ValueError("a name is not a text")
    if not all(type(size) is int and 0 <= size < MOST for size in sizes):
        raise ValueError("a size or number is not a whole number of 0 or more")
    if any(workers > MOST_WORKERS for *_, workers in line["spans"]):
        raise ValueError(f"a span has more than {MOST_WORKERS} workers")
    if not all(type(time) is int and abs(time) < MOST for time in (*times, *(end for end in ends if end is not None))):
        raise ValueError("a time is not a whole number of ns")
    if line["end"] is not None and line["end"] < line["begin"]:
        raise ValueError("the pass ends before it begins")


def _begun(raw: Sequence[tuple[Any, ...]]) -> tuple[Span, ...]:
    """Return spans whose collectives begin when issued or, if later, when a worker of the backend is free.

    A collective waits for one of `workers` threads, a send or receive for its one connection. 0 workers: no waiting.
    """
    free: dict[int, list[int]] = {}
    spans = []
    for kind, name, index, queued, end, workers in sorted(raw, key=lambda span: int(span[3])):
        begin = queued
        if workers:
            ends = free.setdefault(workers, [queued] * workers)
            worker = min(range(workers), key=ends.__getitem__)
            begin = min(max(queued, ends[worker]), end)
            ends[worker] = end
        spans.append(Span(kind, name, index, queued, begin, end))
    return tuple(spans)
