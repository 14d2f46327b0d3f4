"""The fused kernel for CPU ranks of one host: rows pass through shared memory, written where the peers read them.

Each rank's matmul writes its rows straight into a stage that all ranks map; sums are taken there, in
rank order and in fp32, so the result is the same on all ranks, in every run, for every number of ranks.
The C++ part is in csrc/ (communicator.h has the protocol); here is how ranks come to share a segment.

Whether a group can is found out by trying, once, by all its ranks together: a host name proves nothing.
docs/shm.md has the limits and what happens when a rank fails.
"""

from __future__ import annotations

import importlib
import secrets
import time
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import CollectiveError, Pending, first_line
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.rows import ROW_TILE, Sizes, deterministic_tile
from ascend_parallel.process_groups import describe

MAX_RANKS = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each rank has two halves of a stage, and this is what a half starts with; larger problems make it grow.
FIRST_BYTES = 4 << 20
# Rows pass through a half in pieces of about this much. Smaller pieces would stay in a cache that the ranks share,
# but make them wait for one another more often; where they share none, or the machine is busy, that costs more.
PIECE_BYTES = 32 << 20
PIECE_ROWS = 256  # at least: fewer would cost the matmul some percent
FEW_ROWS = 256  # gathered ones of a rank, fewer than which are better multiplied together than rank by rank
TIME_LIMIT = 300.0
SHORTEST_NAP, LONGEST_NAP = 0.0005, 0.05


# What each group shares: its communicator, or why it can have none.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def extension() -> ModuleType | str:
    """Return the C++ extension, or why there is none."""
    try:
        return importlib.import_module("ascend_parallel.ops._shm")
    except ImportError as error:
        return f"the C++ extension is not built: install with a compiler and --no-build-isolation ({error})"


def supports(problem: Problem) -> str | None:
    """Say why the kernel cannot run `problem`, or None; `problem.shm` is what `reach` found of the group."""
    if problem.device != "cpu":
        return f"device {problem.device}, not cpu"
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype}, not one of {', '.join(map(str, DTYPES))}"
    if problem.antiquant:
        return "it takes no int8 weight"
    return _wrong_count(problem.ranks) or problem.shm


def ask(problem: Problem, group: dist.ProcessGroup, time_limit: float = TIME_LIMIT) -> Problem:
    """Return `problem` with what `reach` finds of its group, which is asked only where all else allows the kernel."""
    able = replace(problem, shm=None)
    return replace(problem, shm=reach(group, time_limit)) if supports(able) is None else problem


def reach(group: dist.ProcessGroup, time_limit: float = TIME_LIMIT) -> str | None:
    """Find out, with all ranks of `group`, whether they can share memory; None if so, else the reason.

    The answer is the same on every rank: it is made of every rank's report. Raises `CollectiveError`
    naming the ranks that do not report within `time_limit` seconds.
    """
    if refusal := _wrong_count(group.size()):
        return refusal
    if group not in _SHARED:
        _SHARED[group] = _open(group, FIRST_BYTES, time_limit)
    shared = _SHARED[group]
    return shared if isinstance(shared, str) else None


def _wrong_count(ranks: int) -> str | None:
    return None if 2 <= ranks <= MAX_RANKS else f"{ranks} ranks, not 2 to {MAX_RANKS}"


def pieces(problem: Problem) -> Sizes:
    """Return the rows that pass through a stage at a time: about `PIECE_BYTES` of them, cut at multiples of a tile."""
    tile = deterministic_tile(problem.m) if problem.deterministic else ROW_TILE
    row_bytes = max(1, (problem.k if problem.operator == ALL_GATHER else problem.n) * problem.dtype.itemsize)
    most = max(PIECE_BYTES // row_bytes, PIECE_ROWS, tile) // tile * tile
    count = max(1, -(-problem.rows // most))
    cuts = [problem.rows // tile * index // count * tile for index in range(count)]
    return tuple(stop - start for start, stop in pairwise([*cuts, problem.rows]))


def together(rows: int) -> bool:
    """Tell whether gathered rows, so many of each rank, are multiplied whole instead of where they lie."""
    return rows < FEW_ROWS or rows % ROW_TILE != 0


def matmul_all_reduce(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    time_limit: float = TIME_LIMIT,
    row_tile: int = 0,
) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks in rank order: [M, N], finished, the same on every rank.

    Raises `CollectiveError` naming a rank that ends, fails, or keeps this one waiting for more than `time_limit`
    seconds; on every rank, naming what each came with, if that is not the same call; so do the other two.
    """
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    _run(ALL_REDUCE, group, x_m, w, y_m, sizes, row_tile, time_limit)
    return Pending(y_m, ALL_REDUCE, group)


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    time_limit: float = TIME_LIMIT,
    row_tile: int = 0,
) -> Pending:
    """``[M, K] x [K, N]``, then this rank's M / R rows of the sum in rank order: [M / R, N], finished."""
    y_shard_m = x_m.new_empty(x_m.shape[0] // group.size(), w.shape[1])
    _run(REDUCE_SCATTER, group, x_m, w, y_shard_m, sizes, row_tile, time_limit)
    return Pending(y_shard_m, REDUCE_SCATTER, group)


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    keep_gathered: bool = True,
    time_limit: float = TIME_LIMIT,
    row_tile: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Every rank's ``[M / R, K]`` rows, read where they lie, times ``[K, N]``: [M, N], and [M, K] if kept."""
    rows = group.size() * x_shard_m.shape[0]
    y_m = x_shard_m.new_empty(rows, w.shape[1])
    gathered = x_shard_m.new_empty(rows, x_shard_m.shape[1]) if keep_gathered else None
    whole = not row_tile and together(x_shard_m.shape[0])
    _run(ALL_GATHER, group, x_shard_m, w, y_m, gathered, whole, sizes, row_tile, time_limit)
    return y_m, gathered


def _run(operator: str, group: dist.ProcessGroup, *args: Any) -> None:
    """Call the communicator; as often as it asks for more room, which it does alike on all ranks, give it more."""
    assert not isinstance(_SHARED[group], str), "chosen without asking reach()"
    try:
        while needed := getattr(_SHARED[group], operator)(*args):
            _SHARED[group] = _larger(group, needed, args[-1])
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"shm {operator} on {describe(group)} failed on rank {dist.get_rank()}: {first_line(error)}"
        ) from error
    COUNTS.add(operator, 1, 1)


def _larger(group: dist.ProcessGroup, needed: int, time_limit: float) -> Any:
    doubled = min(2 * _SHARED[group].half_bytes, PIECE_BYTES)
    opened = _open(group, max(needed, doubled), time_limit)
    if isinstance(opened, str):
        raise CollectiveError(
            f"shm on {describe(group)}: no room for 2 x {needed} bytes a rank ({opened}); "
            "give /dev/shm more, or leave USE_COC_FUSED_KERNEL=0"
        )
    return opened


def _open(group: dist.ProcessGroup, half_bytes: int, time_limit: float) -> Any:
    """Make a segment on the first rank, open it on the others, hear from all, and take its name away.

    Returns the communicator, or the reports of what failed; the same kind on every rank.
    """
    name = report = ""
    made: Any = None
    try:
        meeting = _Meeting(group, time_limit)
        if meeting.first:
            meeting.say("name", f"/ascend_parallel-{secrets.token_hex(16)}")
        name = meeting.hear("name")
        # Nothing is made before all know what to take away, should the first rank end.
        meeting.say("known", "")
        if meeting.first:
            meeting.hear_all("known")
        else:
            meeting.hear("made")
        try:
            made = _communicator(name, group, half_bytes)
        except (RuntimeError, OSError) as error:
            report = f"rank {dist.get_rank()}: {first_line(error)}"
        if meeting.first:
            meeting.say("made", "")
        meeting.say("report", report)
        reports = meeting.hear_all("report")
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"shm on {describe(group)}: the group's store failed: {first_line(error)}") from error
    finally:
        # By every rank, as any may have ended. All have opened it by now, or this one has given up.
        _unlink(name)
    return "; ".join(filter(None, reports)) or made


class _Meeting:
    """The ranks of a group telling each other, through its store, what one segment needs; within a time limit.

    Looks at the store again and again instead of waiting in it: a store serves one request at a time, so
    another thread's request would wait until the time limit.
    """

    def __init__(self, group: dist.ProcessGroup, time_limit: float) -> None:
        """Come to the next meeting of `group`."""
        self._group = group
        self._store = c10d._get_process_group_store(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._time_limit = time_limit
        self._end = time.monotonic() + time_limit
        # Counted in the store, so that a group made anew on it never reads what an earlier one left there.
        self._prefix = f"ascend_parallel/shm/{self._store.add(f'ascend_parallel/shm/opened/{group.rank()}', 1)}"

    @property
    def first(self) -> bool:
        """Whether this is the rank that makes the segment."""
        return self._group.rank() == 0

    def say(self, what: str, text: str) -> None:
        """Tell the others."""
        self._store.set(f"{self._prefix}/{what}/{self._group.rank()}", text)

    def hear(self, what: str) -> str:
        """Wait for what the first rank says."""
        return self._hear(what, [0])[0]

    def hear_all(self, what: str) -> list[str]:
        """Wait for what each rank says."""
        return self._hear(what, list(range(len(self._ranks))))

    def _hear(self, what: str, speakers: list[int]) -> list[str]:
        keys = {rank: f"{self._prefix}/{what}/{rank}" for rank in speakers}
        nap = SHORTEST_NAP
        while missing := [rank for rank, key in keys.items() if not self._store.check([key])]:
            if time.monotonic() > self._end:
                names = ", ".join(str(self._ranks[rank]) for rank in missing)
                raise CollectiveError(
                    f"shm on {describe(self._group)}: no sign of rank {names} within {self._time_limit:g} s "
                    "while opening shared memory: it has stopped or never came to the operator"
                )
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        return [self._store.get(key).decode() for key in keys.values()]


def _communicator(name: str, group: dist.ProcessGroup, half_bytes: int) -> Any:
    module = extension()
    if isinstance(module, str):
        raise RuntimeError(module)
    return module.Communicator(name, group.rank(), dist.get_process_group_ranks(group), half_bytes)


def _unlink(name: str) -> None:
    module = extension()
    if name and not isinstance(module, str):
        module.unlink(name)
