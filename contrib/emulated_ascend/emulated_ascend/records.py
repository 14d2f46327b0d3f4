"""What runs under the virtual clock leave behind: moments and spans of each rank, and the figures from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

Span = tuple[int, str, int, int, str]
Window = tuple[int, int]
KERNELS, COLLECTIVE, HOST, EXPOSED = "kmc", "l", "h", "x"
WORKS = KERNELS + "s"  # and what collectives that take cores add to matmuls


@dataclass(frozen=True)
class Step:
    """A step of one rank in milliseconds: from the moment in which the device ends a step to that of the next.

    step         the whole
    busy         the device computes or copies
    starved      its stream has nothing to do, since the host has not launched yet
    exposed      its stream waits for a collective
    collectives  all collectives, under computation or not; waits for other ranks are not in it
    host         what the program's threads compute, launches included
    kernels      kernels on the stream that computes
    """

    step: float
    busy: float
    starved: float
    exposed: float
    collectives: float
    host: float
    kernels: int


@dataclass(frozen=True)
class Record:
    """What a process wrote: moments (host, host busy, device, peak bytes) and spans, in nanoseconds."""

    marks: Sequence[tuple[int, int, int, int]]
    spans: Sequence[Span]

    @staticmethod
    def read(path: Path) -> Record:
        """Read a file of `write`."""
        data = json.loads(path.read_text())
        return Record([tuple(mark) for mark in data["marks"]], [tuple(span) for span in data["spans"]])

    @property
    def communicating(self) -> set[int]:
        """Streams of collectives."""
        return {span[0] for span in self.spans if span[1] == COLLECTIVE}

    @property
    def main_stream(self) -> int | None:
        """The stream that computes most."""
        work: dict[int, int] = {}
        others = self.communicating
        for stream, kind, begin, end, _ in self.spans:
            if kind in WORKS and stream >= 0 and stream not in others:
                work[stream] = work.get(stream, 0) + end - begin
        return max(work, key=lambda stream: work[stream]) if work else None

    def steps(self) -> list[Step]:
        """Return what lies between the marks."""
        main, others = self.main_stream, self.communicating
        made = []
        for before, after in zip(self.marks, self.marks[1:], strict=False):
            window = (before[2], after[2])
            inside = [span for span in self.spans if span[3] > window[0] and span[2] < window[1]]
            computing = [span for span in inside if span[0] not in others and span[1] in WORKS and span[0] >= 0]
            waiting = [span for span in inside if span[0] == main]
            made.append(
                Step(
                    step=(window[1] - window[0]) / 1e6,
                    busy=covered(computing, window) / 1e6,
                    starved=covered((span for span in waiting if span[1] == HOST), window) / 1e6,
                    exposed=covered((span for span in waiting if span[1] == EXPOSED), window) / 1e6,
                    collectives=covered((span for span in inside if span[1] == COLLECTIVE), window) / 1e6,
                    host=(after[1] - before[1]) / 1e6,
                    kernels=sum(span[0] == main and span[1] in KERNELS for span in inside),
                )
            )
        return made

    def lanes(self, rank: int) -> list[dict[str, Any]]:
        """Return the spans as events of a trace that chrome://tracing and Perfetto show."""
        named = {HOST: "waits", EXPOSED: "waits", "w": "waits", "r": "waits"}
        streams = sorted({span[0] for span in self.spans})
        titles = {stream: "host" if stream < 0 else f"stream {stream}" for stream in streams}
        titles |= {stream: f"collectives {stream}" for stream in self.communicating}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": stream, "args": {"name": title}}
            for stream, title in titles.items()
        ]
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}, emulated"}})
        events += [
            {
                "ph": "X", "name": name, "cat": named.get(kind, "work"), "pid": rank, "tid": stream,
                "ts": begin / 1e3, "dur": (end - begin) / 1e3,
            }
            for stream, kind, begin, end, name in self.spans
        ]  # fmt: skip
        events += [
            {"ph": "i", "name": f"step {number}", "pid": rank, "tid": self.main_stream, "ts": mark[2] / 1e3, "s": "p"}
            for number, mark in enumerate(self.marks)
        ]
        return events


def covered(spans: Iterable[Span], window: Window) -> int:
    """Return how much of a window the spans cover, overlapping ones once."""
    total, reached = 0, window[0]
    for _, _, begin, end, _ in sorted(spans, key=lambda span: span[2]):
        begin, end = max(begin, reached), min(end, window[1])
        if end > begin:
            total += end - begin
            reached = end
    return total


def typical(steps: Sequence[Step]) -> Step:
    """Return the medians of steps."""
    fields = {name: median(asdict(step)[name] for step in steps) for name in asdict(steps[0])}
    return Step(**{**fields, "kernels": int(fields["kernels"])})


def summary(folder: Path, warm_up: int = 1) -> dict[str, Any]:
    """Return what the records of a folder say: steps behind the warm-up and their medians by rank, and memory."""
    records = {int(path.stem.partition("-")[2]): Record.read(path) for path in sorted(folder.glob("rank-*.json"))}
    if not records:
        return {}
    steps = {rank: made[min(warm_up, len(made) - 1) :] for rank, record in records.items() if (made := record.steps())}
    return {
        "ranks": len(records),
        "steps": {rank: [asdict(step) for step in made] for rank, made in steps.items()},
        "typical": {rank: asdict(typical(made)) for rank, made in steps.items()},
        "memory_mb": max((mark[3] for record in records.values() for mark in record.marks), default=0) >> 20,
    }


def said(result: dict[str, Any], device: str) -> list[str]:
    """Write a summary as lines: the slowest rank's typical step, and what bounds it."""
    if not result or not result["typical"]:
        return ["no steps: one ends where an optimizer's step() returns, or at a call of emulated_ascend.clock.mark()"]
    rank, step = max(result["typical"].items(), key=lambda item: item[1]["step"])
    count = len(result["steps"][rank])
    return [
        f"emulated {device}, ranks: {result['ranks']}, real torch_npu; times of a table, not of a card",
        f"step          {step['step']:9.2f} ms    (median of {count}, rank {rank})",
        f"device busy   {step['busy']:9.2f} ms    {step['kernels']} kernels",
        f"starved       {step['starved']:9.2f} ms    the device waits for the host",
        f"exposed       {step['exposed']:9.2f} ms    of {step['collectives']:.2f} ms of collectives",
        f"host          {step['host']:9.2f} ms    processor time of the program's threads, and launches",
        f"memory        {result['memory_mb']:9d} MB    reserved at most",
        verdict(step),
    ]


def verdict(step: dict[str, Any]) -> str:
    """Say what a step waits for most."""
    if step["starved"] > 0.15 * step["step"]:
        return (
            "the host is in the way: the device waits for launches "
            f"{step['starved'] / step['step']:.0%} of the step; larger micro-batches, fewer kernels or graphs help"
        )
    if step["exposed"] > 0.05 * step["step"]:
        return f"communication is in the way: exposed {step['exposed'] / step['step']:.0%} of the step"
    return "the device computes most of the time: there is little to hide"
