"""The file that each rank writes: JSON lines, a header and then one pass per line. All times in ns.

    {"format": "ascend_parallel timeline", "version": 1, "run": ..., "rank": 0, "ranks": 2, ...}
    {"layer": "mlp.linear_fc2", "kind": "row", "direction": "forward", "group": [0, 1], "begin": ..., "end": ...,
     "calls": [{"operator": "matmul_all_reduce", "m": ..., ...}],
     "spans": [[kind, name, index, begin, end, workers], ...]}

Times are those of the rank's own clock. A span whose end is null had not ended when the file was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT, VERSION = "ascend_parallel timeline", 1
PATTERN = "timeline-*-rank*.jsonl"
SPAN_KINDS = ("matmul", "beside", "comm", "wait", "fused", "clocks")


class TimelineError(ValueError):
    """A folder or file that no timeline can be made of; the message says what is wrong with it."""


@dataclass(frozen=True)
class Span:
    """Something that ran, in ns; `queued` is when a collective was handed over, `begin` when it can have begun."""

    kind: str
    name: str
    index: int
    queued: int
    begin: int
    end: int


@dataclass(frozen=True)
class Pass:
    """One forward or backward of a layer, or one operator called by itself; unfinished if a span has no end."""

    layer: str
    kind: str
    direction: str
    group: tuple[int, ...]
    begin: int
    end: int
    calls: tuple[dict[str, Any], ...]
    spans: tuple[Span, ...]
    finished: bool

    @property
    def key(self) -> tuple[str, str]:
        """What tells a layer's passes from those of others: its name or shape, and the direction."""
        return self.title, self.direction

    @property
    def title(self) -> str:
        """The layer's name, or what it is and the shape of its matmul."""
        if self.layer:
            return self.layer
        shape = [self.calls[0][side] for side in "mkn"] if self.calls else ""
        return f"{self.kind} {shape}".strip()


@dataclass
class RankFile:
    """What one rank recorded."""

    path: Path
    header: dict[str, Any]
    passes: list[Pass] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return int(self.header["rank"])


def write(folder: Path, header: dict[str, Any], passes: Iterable[dict[str, Any]]) -> Path:
    """Write one rank's file at once: whoever looks sees no file or the whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"timeline-{header['run']}-rank{header['rank']}.jsonl"
    lines = [{"format": FORMAT, "version": VERSION, **header}, *passes]
    replace_text(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read_run(folder: Path, run: str | None = None) -> tuple[list[RankFile], list[str]]:
    """Read the files of one run, the latest if `run` is None, in rank order; and what a user should know of them.

    Raises `TimelineError` if there is nothing to read, or a file is none of ours or damaged.
    """
    if not folder.is_dir():
        raise TimelineError(f"{folder}: no such folder; give the one that COC_TIMELINE named")
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise TimelineError(
            f"{folder}: no timeline-*-rank*.jsonl in it; run with COC_TIMELINE={folder}, and wait until the run has "
            "ended: files are written then"
        )
    headers = {path: _read_header(path) for path in paths}
    runs = sorted({header["run"] for header in headers.values()})
    chosen = runs[-1] if run is None else run
    if chosen not in runs:
        raise TimelineError(f"{folder}: there is no run {chosen!r}; there are {', '.join(runs)}")
    files = sorted((_read(path) for path in paths if headers[path]["run"] == chosen), key=lambda file: file.rank)
    notes = [f"{folder} has other runs too: {', '.join(set(runs) - {chosen})} (--run)"] if len(runs) > 1 else []
    return files, [*_missing(files), *_cut(files), *notes]


def _missing(files: Sequence[RankFile]) -> list[str]:
    known = {file.rank for file in files}
    lacking = [rank for rank in range(files[0].header["ranks"]) if rank not in known]
    if not lacking:
        return []
    return [
        f"of {files[0].header['ranks']} ranks the files of rank {', '.join(map(str, lacking))} are missing: they ended "
        "without writing one, recorded nothing, or wrote it on another host"
    ]


def _cut(files: Sequence[RankFile]) -> list[str]:
    """Say which ranks recorded more than they kept."""
    return [
        f"rank {file.rank} kept its last {len(file.passes)} of {file.header['passes']} passes (timeline_passes)"
        for file in files
        if file.header["passes"] > len(file.passes)
    ]


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            header = json.loads(lines.readline())
    except (OSError, ValueError) as error:
        raise TimelineError(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TimelineError(f"{path} is no file of an ascend_parallel timeline")
    if header.get("version") != VERSION:
        raise TimelineError(f"{path} has version {header.get('version')!r} of the format; this package reads {VERSION}")
    wanted = {"run": str, "rank": int, "ranks": int, "passes": int, "host": str, "boot": str, "clocks": list}
    for name, kind in wanted.items():
        if not isinstance(header.get(name), kind):
            raise TimelineError(f"{path} is damaged: its header has {name}={header.get(name)!r}")
    return header


def _read(path: Path) -> RankFile:
    file = RankFile(path, _read_header(path))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], start=2):
        try:
            file.passes.append(_pass(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise TimelineError(f"{path}, line {number}, is damaged ({what}); move the file away to go on") from error
    return file


def _pass(line: dict[str, Any]) -> Pass:
    ends = [line["end"], *(end for *_, end, _ in line["spans"])]
    last = max(end for end in [line["begin"], *(begin for *_, begin, _, _ in line["spans"]), *ends] if end is not None)
    raw = [(*what, begin, last if end is None else end, workers) for *what, begin, end, workers in line["spans"]]
    if any(kind not in SPAN_KINDS or not begin <= end for kind, _, _, begin, end, _ in raw):
        raise ValueError("a span of an unknown kind, or one that ends before it begins")
    finished = None not in ends
    spans = _begun(raw)
    what = (line["layer"], line["kind"], line["direction"], tuple(line["group"]))
    return Pass(*what, line["begin"], last, tuple(line["calls"]), spans, finished)


def _begun(raw: Sequence[tuple[Any, ...]]) -> tuple[Span, ...]:
    """Let each collective begin when it was handed over or, if later, when one of the backend's workers was free.

    Collectives wait for `workers` threads, sends and receives for one connection; nobody waits where it is 0.
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
