"""What `bench` and `tune` measure of exchanges around parts, of experts or of heads: times, figures, a plan.

All variants of an exchange compute the same, forward and backward. Beside them stand T_comp, the parts alone, and
T_comm, the collectives alone; several T_comm are ways to send the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ascend_parallel.ops.call import Exchange
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.text.tables import terminal_table
from ascend_parallel.tuning.bench.results import speedup_of
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.chunk_plan import Plan, this_machine
from ascend_parallel.tuning.measured.part_groups import fastest_groups
from ascend_parallel.tuning.measured.rank_clock import RankClock

SERIAL, AUTO = "serial", "auto"
COMPUTATION, COMMUNICATION = "T_comp", "T_comm"  # names of all ways to send begin with the second

Run = Callable[[], object]


def times_of(runs: Mapping[str, Run], group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, by variant and round; every rank of `group` calls this alike."""
    clock = RankClock(group, "cpu")
    timed = {name: functools.partial(clock.seconds, run) for name, run in runs.items()}
    return clock.rounds(timed, rounds, lambda number: report(f"round {number} of {rounds}"))


def plan_of(
    exchange: Exchange,
    group: dist.ProcessGroup,
    overlapped: Callable[[int], object],
    in_turn: Run,
    groups: Sequence[int],
) -> dict[str, Any]:
    """Return a plan with the fastest number of groups of an exchange, as COC_TUNE measures them."""
    device = torch.device("cpu")
    runs = {
        split_rows(exchange.parts, count, 1): functools.partial(overlapped, count)
        for count in groups
        if count <= exchange.parts
    }
    entry = fastest_groups(exchange, group, runs, in_turn, device)
    machine = this_machine(group.size(), device, group._get_backend(device).name())
    return {"plan": Plan(machine, (entry,)).as_dict(), "torch": torch.__version__}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A variant: median seconds, median of the paired ratio serial / own with its 95 % interval, share of the bound."""

    name: str
    seconds: float
    speedup: float
    low: float
    high: float
    of_bound: float


def parts_of(times: Mapping[str, list[float]]) -> tuple[float, float]:
    """Return T_comp and T_comm: the medians, of the fastest way to send."""
    sent = [median(seconds) for name, seconds in times.items() if name.startswith(COMMUNICATION)]
    return median(times[COMPUTATION]), min(sent)


def figures_of(times: Mapping[str, list[float]]) -> list[Figure]:
    """Return the figures of all variants, serial first."""
    bound = max(parts_of(times))
    figures = []
    for name, ours in times.items():
        if not name.startswith((COMPUTATION, COMMUNICATION)):
            (speedup, low, high), seconds = speedup_of(times[SERIAL], ours), median(ours)
            figures.append(
                Figure(name=name, seconds=seconds, speedup=speedup, low=low, high=high, of_bound=seconds / bound)
            )
    return figures


def as_dict(case: Any, times: Mapping[str, list[float]], chosen: str) -> dict[str, Any]:
    """Return plain values, for JSON; seconds. case: the dataclass of what was timed. chosen: what "auto" takes."""
    variants = [asdict(figure) for figure in figures_of(times)]
    computation, communication = parts_of(times)
    return {
        "case": asdict(case),
        "computation": computation,
        "communication": communication,
        "auto": chosen,
        "variants": variants,
        "times": dict(times),
    }


def show(times: Mapping[str, list[float]], chosen: str, conditions: str, console: Console) -> None:
    """Print the figures beside their lower bound. chosen: what "auto" takes."""
    parts = parts_of(times)
    ideal = sum(parts) / max(parts)
    heads = ("variant", "ms", "serial / own", "95 %", "time / bound")
    rows = [
        (
            f"{AUTO}: {chosen}" if figure.name == AUTO else figure.name,
            f"{1e3 * figure.seconds:.1f}",
            f"{figure.speedup:.2f}",
            f"{figure.low:.2f}-{figure.high:.2f}",
            f"{figure.of_bound:.2f}",
        )
        for figure in figures_of(times)
    ]
    console.print(terminal_table(conditions, heads, rows, right=range(1, len(heads))))
    computed, moved = (f"{1e3 * seconds:.1f}" for seconds in parts)
    console.print(
        f"T_comp {computed} ms, T_comm {moved} ms: no schedule is faster than the longer of the two; in turn they "
        f"take {ideal:.2f} times as long."
    )
