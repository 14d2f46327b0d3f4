"""Compare a run with a serial run: note where overlap lost, and what could not be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ascend_parallel.diagnostics.timeline.files import RankFile
from ascend_parallel.diagnostics.timeline.table import Row, alone, kernel_of


def compare(rows: Sequence[Row], serial: Sequence[RankFile], folder: Path) -> list[str]:
    """Return notes for the reader on `rows`, whose serial times come from the files of `folder`."""
    calls = [call for file in serial for layer_pass in file.passes for call in layer_pass.calls]
    overlapped = sorted({kernel_of(call) for call in calls if not alone(call)})
    if overlapped:
        return [f"{folder} is not a serial run, but has {', '.join(overlapped)}: record a serial run with COC_MODE=1"]
    compared = [row for row in rows if row.serial is not None]
    if not compared:
        return [f"{folder} has no pass of the same layers and shapes: nothing is compared"]
    # The record of a fused operator does not show its communication.
    return _losses([row for row in compared if row.comm != 0])


def _losses(rows: Sequence[Row]) -> list[str]:
    lost = [row for row in rows if row.lost]
    if not lost:
        return []
    worst = max(lost, key=lambda row: row.total - _serial(row))
    total, serial = sum(row.total for row in rows), sum(map(_serial, rows))
    where = "here" if total > serial else "in part"
    return [
        f"overlap loses {where}: {len(lost)} of {len(rows)} passes that communicate took longer than in the serial "
        f"run, {worst.layer} {worst.direction} most ({worst.total:.2f} ms against {_serial(worst):.2f} ms); all "
        f"together took {total:.2f} ms against {serial:.2f} ms. Try COC_PARALLEL_NUM=auto, or COC_TUNE=plan.json, "
        "which measures in the run: both keep one chunk where overlap is slower"
    ]


def _serial(row: Row) -> float:
    assert row.serial is not None
    return row.serial
