"""What each layer's forward and backward took, and how much of its communication was hidden.

    E_bound = (T_seq - T) / (T_seq - max(T_matmul, T_comm)), from 0 to 1

as in benchmarks/README.md: 1 where everything that could be hidden was, 0 where nothing was, or where overlap lost.
T_matmul, T_comm and T_seq are those of a serial run if one is given to compare with; else T_seq is T_matmul +
T_comm of the run itself, whose parts take longer than alone because they share the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ascend_parallel.diagnostics.timeline.files import Pass, RankFile
from ascend_parallel.diagnostics.timeline.intervals import Intervals, length, union, within, without
from ascend_parallel.ops.registry import FUSED

# Less to hide than this share of T_seq drowns in noise: no quotient is given.
LEAST_SHARE = 0.03
# A pass that takes this share of the serial time more has lost by more than the medians' last digit.
LEAST_LOSS = 0.02


@dataclass(frozen=True, kw_only=True)
class Times:
    """One pass on one rank, or medians of several, in ns; `hidden` is the part of `comm` beside a computation."""

    total: float
    matmul: float
    comm: float
    hidden: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer's forward or backward: medians in ms over its passes on `rank`, the one that took longest.

    exposed
        Time in which a collective ran, or was waited for, and the rank computed nothing.
    hidden
        The share of T_comm that ran beside a computation; None where nothing communicated, or not to be seen (fused).
    serial
        What the same pass took in the serial run; None without one, or where that ran it otherwise than serially.
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


def busy(one: Pass) -> Intervals:
    """When the rank computed."""
    return union((span.begin, span.end) for span in one.spans if span.kind in ("matmul", "beside", "fused"))


def communicating(one: Pass) -> Intervals:
    """When at least one collective ran."""
    return union((span.begin, span.end) for span in one.spans if span.kind == "comm")


def exposed(one: Pass) -> Intervals:
    """When a collective ran or was waited for, and the rank computed nothing."""
    waits = ((span.begin, span.end) for span in one.spans if span.kind == "wait")
    return without(union([*communicating(one), *waits]), busy(one))


def times(one: Pass) -> Times:
    """Measure one pass; comparing clocks, once at a group's first call, counts for nothing."""
    spent = {kind: sum(s.end - s.begin for s in one.spans if s.kind == kind) for kind in ("matmul", "clocks")}
    comm = communicating(one)
    return Times(
        total=one.end - one.begin - spent["clocks"],
        matmul=spent["matmul"],
        comm=length(comm),
        hidden=length(within(comm, busy(one))),
        exposed=length(exposed(one)),
    )


def table(files: Sequence[RankFile], serial: Sequence[RankFile] | None = None) -> list[Row]:
    """Summarize every layer and direction, in the order in which they first ran.

    `serial` are the files of a run without overlap; passes that it lacks, or has with other operators or shapes or in
    chunks, have no E_bound.
    """
    alone = {} if serial is None else _by_key(serial)
    rows = []
    for key, found in _by_key(files).items():
        rank, middle = _slowest(found)
        reference = _serial_times(found[rank][-1], alone.get(key))
        rows.append(_row(key, found[rank], rank, middle, reference, estimated=serial is None))
    return rows


def e_bound(total: float, serial: Times, estimated: bool) -> float | None:
    """Return E_bound of a pass that took `total`; the serial time is T_matmul + T_comm if it is `estimated`.

    A pass that took longer than the serial one has hidden nothing of use, however much longer, which is 0.
    """
    if not serial.matmul or not serial.comm:
        return None
    sequence = serial.matmul + serial.comm if estimated else serial.total
    to_hide = sequence - max(serial.matmul, serial.comm)
    return min(max((sequence - total) / to_hide, 0.0), 1.0) if to_hide > LEAST_SHARE * sequence else None


def _by_key(files: Iterable[RankFile]) -> dict[tuple[str, str], dict[int, list[Pass]]]:
    """Finished passes by layer and direction, then by rank."""
    found: dict[tuple[str, str], dict[int, list[Pass]]] = {}
    for file in files:
        for one in file.passes:
            if one.finished:
                found.setdefault(one.key, {}).setdefault(file.rank, []).append(one)
    return found


def _slowest(by_rank: dict[int, list[Pass]]) -> tuple[int, Times]:
    """Return the rank whose median pass took longest, and its medians."""
    middles = {rank: _middle([times(one) for one in passes]) for rank, passes in by_rank.items()}
    rank = max(middles, key=lambda rank: middles[rank].total)
    return rank, middles[rank]


def _middle(measured: list[Times]) -> Times:
    return Times(**{name: median(getattr(one, name) for one in measured) for name in Times.__dataclass_fields__})


def _serial_times(last: Pass, found: dict[int, list[Pass]] | None) -> Times | None:
    """Return the times of the serial run's same pass; None if it has none of the same shapes, run serially."""
    if not found:
        return None
    rank, middle = _slowest(found)
    serial = found[rank][-1]
    return middle if all(map(alone, serial.calls)) and _shape(serial) == _shape(last) else None


def alone(call: dict[str, Any]) -> bool:
    """Tell whether a call ran its matmul and its collective one after the other: whole, by no fused kernel."""
    return call["chunks"] == 1 and call["kernel"] not in FUSED


def kernel_of(call: dict[str, Any]) -> str:
    """Name the kernel that ran a call, and its chunks."""
    return f"{call['kernel']} {call['chunks']}"


def _shape(one: Pass) -> str:
    return ", ".join(f"{call['operator']} [{call['m']}, {call['k']}, {call['n']}]" for call in one.calls)


def _row(
    key: tuple[str, str], passes: list[Pass], rank: int, middle: Times, serial: Times | None, estimated: bool
) -> Row:
    last = passes[-1]
    fused = any(span.kind == "fused" for span in last.spans)
    apart = (lambda _: None) if fused else (lambda value: value / 1e6)
    reference = middle if estimated else serial
    return Row(
        layer=key[0],
        direction=key[1],
        shape=_shape(last),
        kernel=", ".join(map(kernel_of, last.calls)),
        passes=len(passes),
        rank=rank,
        total=middle.total / 1e6,
        matmul=apart(middle.matmul),
        comm=apart(middle.comm),
        exposed=apart(middle.exposed),
        hidden=None if fused or not middle.comm else middle.hidden / middle.comm,
        serial=None if serial is None else serial.total / 1e6,
        e_bound=None if fused or reference is None else e_bound(middle.total, reference, estimated),
    )
