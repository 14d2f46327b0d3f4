"""The part of a report that runs on the ranks: seconds of each collective by size."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, OPERATORS, REDUCE_SCATTER
from ascend_parallel.tuning.launch.devices import device_of
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.pass_parts import Collective
from ascend_parallel.tuning.measured.rank_clock import RankClock

COLUMNS = 256  # of fp32: a row has 1 KiB
NAMES = {ALL_REDUCE: "all-reduce", REDUCE_SCATTER: "reduce-scatter", ALL_GATHER: "all-gather"}


def measure(group: dist.ProcessGroup, kibibytes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return the median seconds of each collective by the bytes of its whole tensor, on the slowest rank.

    kibibytes: sizes of the whole tensor; a gather or scatter of R ranks takes at least a row for each rank.
    bus: bytes per second that each rank sends, if ranks send no byte twice: (R - 1) / R of the tensor, and twice that
    for an all-reduce.
    """
    device = device_of(group)
    clock, ranks = RankClock(group, device), group.size()
    like, found = torch.empty(0, device=device), []
    for operator in OPERATORS:
        for size in kibibytes:
            rows = size if operator == ALL_REDUCE else max(1, size // ranks)
            whole = 1024 * (rows if operator == ALL_REDUCE else rows * ranks)
            report(f"{NAMES[operator]} of {whole} bytes")
            run = partial(Collective(operator, group, like, rows, COLUMNS).run, (rows,))
            seconds = median(clock.rounds({size: partial(clock.seconds, run)}, rounds)[size])
            sent = whole * (ranks - 1) / ranks * (2 if operator == ALL_REDUCE else 1)
            found.append({"collective": NAMES[operator], "bytes": whole, "seconds": seconds, "bus": sent / seconds})
    return found
