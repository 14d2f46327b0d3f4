"""Compute the table of a timeline: the times of each layer's passes, and the hidden share of their communication.

With a serial run to compare with, T_matmul, T_comm and T_serial of E_bound (`tuning/e_bound.py`) are its times.
Otherwise T_serial is T_matmul + T_comm of the run itself, whose parts are slower than alone because they share the
machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ascend_parallel.diagnostics.intervals import Intervals, length, union, within, without
from ascend_parallel.diagnostics.timeline.files import COMPUTING, Pass, RankFile
from ascend_parallel.ops.registry import FUSED
from ascend_parallel.tuning.e_bound import e_bound

# A pass lost if it is slower than the serial pass by more than this share, which exceeds the medians' rounding.
LEAST_LOSS = 0.02


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of a pass on a rank, or medians of several, in ns; `hidden` is the part of `comm` beside computation."""

    total: float
    matmul: float
    comm: float
    hidden: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Forward or backward of one layer: medians in ms over its passes on `rank`, the slowest rank.

    exposed
        Time in which a collective ran, or the rank waited for a collective, and the rank computed nothing.
    hidden
        The share of T_comm beside a computation; None without communication, or for a fused kernel.
    serial
        Time of the same pass in the serial run; None without a serial run, or if the pass was not serial there.
    """

    layer: str
    direction: str
    shape: str
    kernel: str
    passes: int
    rank: int
    total: float
    matmul: float | None
    comm: float | None
    exposed: float | None
    hidden: float | None
    serial: float | None
    e_bound: float | None

    @property
    def lost(self) -> bool:
        """Whether the pass took longer than in the serial run."""
        return self.serial is not None and self.total > (1 + LEAST_LOSS) * self.serial

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "lost": self.lost}


def busy(layer_pass: Pass) -> Intervals:
    """Return when the rank computed, in this pass or, while its collectives ran, in others."""
    own = ((span.begin, span.end) for span in layer_pass.spans if span.kind in COMPUTING)
    return union([*own, *layer_pass.elsewhere])


def communicating(layer_pass: Pass) -> Intervals:
    """Return when at least one collective ran."""
    return union((span.begin, span.end) for span in layer_pass.spans if span.kind == "comm")


def exposed(layer_pass: Pass) -> Intervals:
    """Return when a collective ran, or the rank waited for a collective, and the rank computed nothing."""
    waits = ((span.begin, span.end) for span in layer_pass.spans if span.kind == "wait")
    return without(union([*communicating(layer_pass), *waits]), busy(layer_pass))


def times(layer_pass: Pass) -> PassTimes:
    """Return the times of one pass, without the clock comparison of a group's first call."""
    spent = {kind: sum(s.end - s.begin for s in layer_pass.spans if s.kind == kind) for kind in ("matmul", "clocks")}
    comm = communicating(layer_pass)
    return PassTimes(
        total=layer_pass.end - layer_pass.begin - spent["clocks"],
        matmul=spent["matmul"],
        comm=length(comm),
        hidden=length(within(comm, busy(layer_pass))),
        exposed=length(exposed(layer_pass)),
    )


def table(files: Sequence[RankFile], serial: Sequence[RankFile] | None = None) -> list[Row]:
    """Return a row for every layer and direction, in the order in which they first ran.

    serial: the files of a run without overlap. A pass has no E_bound if the serial run lacks the pass, or ran it with
    other operators or shapes, or in chunks.
    """
    serial_passes = {} if serial is None else _by_key(serial)
    rows = []
    for key, by_rank in _by_key(files).items():
        rank, medians = _slowest(by_rank)
        reference = _serial_times(by_rank[rank][-1], serial_passes.get(key))
        rows.append(_row(key, by_rank[rank], rank, medians, reference, estimated=serial is None))
    return rows


def _by_key(files: Iterable[RankFile]) -> dict[tuple[str, str], dict[int, list[Pass]]]:
    """Return the finished passes by layer and direction, then by rank."""
    passes: dict[tuple[str, str], dict[int, list[Pass]]] = {}
    for file in files:
        for layer_pass in file.passes:
            if layer_pass.finished:
                passes.setdefault(layer_pass.key, {}).setdefault(file.rank, []).append(layer_pass)
    return passes


def _slowest(by_rank: dict[int, list[Pass]]) -> tuple[int, PassTimes]:
    """Return the rank with the longest median pass, and its medians."""
    medians = {rank: _medians([times(layer_pass) for layer_pass in passes]) for rank, passes in by_rank.items()}
    rank = max(medians, key=lambda rank: medians[rank].total)
    return rank, medians[rank]


def _medians(measured: list[PassTimes]) -> PassTimes:
    return PassTimes(
        **{name: median(getattr(each, name) for each in measured) for name in PassTimes.__dataclass_fields__}
    )


def _serial_times(last: Pass, serial_passes: dict[int, list[Pass]] | None) -> PassTimes | None:
    """Return the serial run's times of the pass `last`; None unless it ran there serially with the same shapes."""
    if not serial_passes:
        return None
    rank, medians = _slowest(serial_passes)
    serial = serial_passes[rank][-1]
    return medians if all(map(alone, serial.calls)) and _shape(serial) == _shape(last) else None


def alone(call: dict[str, Any]) -> bool:
    """Return whether a call ran its matmul and its collective in turn: in one chunk and not by a fused kernel."""
    return call["chunks"] == 1 and call["kernel"] not in FUSED


def kernel_of(call: dict[str, Any]) -> str:
    """Return the kernel of a call and its number of chunks, as text."""
    return f"{call['kernel']} {call['chunks']}"


def _shape(layer_pass: Pass) -> str:
    return ", ".join(f"{call['operator']} [{call['m']}, {call['k']}, {call['n']}]" for call in layer_pass.calls)


def _row(
    key: tuple[str, str], passes: list[Pass], rank: int, medians: PassTimes, serial: PassTimes | None, estimated: bool
) -> Row:
    last = passes[-1]
    fused = any(span.kind == "fused" for span in last.spans)
    part_ms = (lambda _: None) if fused else (lambda value: value / 1e6)
    share = None
    if not fused and (estimated or serial is not None):
        parts = serial or medians
        in_turn = serial.total if serial else medians.matmul + medians.comm
        share = e_bound(medians.total, in_turn, parts.matmul, parts.comm)
    return Row(
        layer=key[0],
        direction=key[1],
        shape=_shape(last),
        kernel=", ".join(map(kernel_of, last.calls)),
        passes=len(passes),
        rank=rank,
        total=medians.total / 1e6,
        matmul=part_ms(medians.matmul),
        comm=part_ms(medians.comm),
        exposed=part_ms(medians.exposed),
        hidden=None if fused or not medians.comm else medians.hidden / medians.comm,
        serial=None if serial is None else serial.total / 1e6,
        e_bound=share,
    )
