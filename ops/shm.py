"""The fused kernel for CPU ranks of one host: each rank writes its rows to shared memory, where its peers read them.

A rank's matmul writes its rows directly into a stage that all ranks map. Sums run there, in rank order and in
fp32: with any number of ranks, the result is the same on all ranks and in every run. csrc/ has the C++ part
(communicator.h describes the protocol); this module opens the shared segment.

All ranks of a group try once, together, whether they can share memory: equal host names prove nothing. docs/shm.md
lists the limits and the failures.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.arithmetic import DEPENDS_ON_DEGREE
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Matmul
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import CollectiveError, Pending, first_line
from ascend_parallel.ops.rows import ROW_TILE, Sizes
from ascend_parallel.ops.shm_extension import extension
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import store_all_gather

MAX_RANKS = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each rank's stage has two halves. This is the first size of a half; larger problems make it grow.
FIRST_BYTES = 4 << 20
# Rows pass through a half in pieces of about this size. Smaller pieces would stay in a cache that the ranks share,
# but the ranks would wait for each other more often, which costs more on a busy machine or without a shared cache.
PIECE_BYTES = 32 << 20
PIECE_ROWS = 256  # smallest piece: fewer rows would cost the matmul some percent
FEW_ROWS = 256  # fewer gathered rows per rank are multiplied together, not rank by rank
TIME_LIMIT = 300.0


# Each group's communicator, or the reason why it has none.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def supports(matmul: Matmul) -> str | None:
    """Return the reason why the kernel cannot run `matmul`, or None; `matmul.shm` is the result of `reach`."""
    if matmul.device != "cpu":
        return f"device {matmul.device}, not cpu"
    if matmul.dtype not in DTYPES:
        return f"dtype {matmul.dtype}, not one of {', '.join(map(str, DTYPES))}"
    if matmul.antiquant:
        return "it takes no int8 weight"
    return matmul.arithmetic.forbids(DEPENDS_ON_DEGREE) or _wrong_count(matmul.ranks) or matmul.shm


def ask(matmul: Matmul, group: dist.ProcessGroup, time_limit: float = TIME_LIMIT) -> Matmul:
    """Return `matmul` with `shm` set by `reach`; unchanged if another limit excludes the kernel."""
    sharing = replace(matmul, shm=None)
    return replace(matmul, shm=reach(group, time_limit)) if supports(sharing) is None else matmul


def reach(group: dist.ProcessGroup, time_limit: float = TIME_LIMIT) -> str | None:
    """Return None if the ranks of `group` can share memory, else the reason; every rank calls this.

    The result combines every rank's report, so it is the same on every rank. Raises `CollectiveError` with
    the ranks that do not report within `time_limit` seconds.
    """
    if refusal := _wrong_count(group.size()):
        return refusal
    if group not in _SHARED:
        _SHARED[group] = _open(group, FIRST_BYTES, time_limit)
    shared = _SHARED[group]
    return shared if isinstance(shared, str) else None


def _wrong_count(ranks: int) -> str | None:
    return None if 2 <= ranks <= MAX_RANKS else f"{ranks} ranks, not 2 to {MAX_RANKS}"


def pieces(matmul: Matmul) -> Sizes:
    """Return the rows of each piece that passes through a stage: about `PIECE_BYTES`, cut at multiples of a tile."""
    tile = matmul.arithmetic.row_tile(matmul.m) or ROW_TILE
    row_bytes = max(1, (matmul.k if matmul.operator == ALL_GATHER else matmul.n) * matmul.dtype.itemsize)
    most = max(PIECE_BYTES // row_bytes, PIECE_ROWS, tile) // tile * tile
    count = max(1, -(-matmul.rows // most))
    cuts = [matmul.rows // tile * index // count * tile for index in range(count)]
    return tuple(stop - start for start, stop in pairwise([*cuts, matmul.rows]))


def gathers_before_matmul(rows: int) -> bool:
    """Tell whether `rows` rows of each rank are gathered first and multiplied together, not rank by rank in place."""
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
    """Return ``y_m = all_reduce(x_m @ w)``, summed in rank order, finished: x_m [M, K], w [K, N], y_m [M, N].

    Raises `CollectiveError`, as the other two operators do: naming a rank that ends, fails, or does not come
    within `time_limit` seconds; or, if ranks come with different calls, on every rank and naming each rank's call.
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
    """Return ``reduce_scatter(x_m @ w)`` [M / R, N], summed in rank order; x_m [M, K], w [K, N].

    The returned `Pending` has already finished.
    """
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
    """Return ``x_m @ w`` [M, N] and, with keep_gathered, ``x_m = all_gather(x_shard_m)`` [M, K]: x_shard_m [M / R, K].

    The rows are read in place, from the peers' stages.
    """
    rows = group.size() * x_shard_m.shape[0]
    y_m = x_shard_m.new_empty(rows, w.shape[1])
    gathered = x_shard_m.new_empty(rows, x_shard_m.shape[1]) if keep_gathered else None
    whole = not row_tile and gathers_before_matmul(x_shard_m.shape[0])
    _run(ALL_GATHER, group, x_shard_m, w, y_m, gathered, whole, sizes, row_tile, time_limit)
    return y_m, gathered


def _run(operator: str, group: dist.ProcessGroup, *args: Any) -> None:
    """Call the communicator; while it requests a larger segment, on all ranks alike, open a larger segment."""
    assert not isinstance(_SHARED[group], str), "chosen without asking reach()"
    try:
        while needed := getattr(_SHARED[group], operator)(*args):
            _SHARED[group] = _open_larger(group, needed, args[-1])
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"shm {operator} on {describe(group)} failed on rank {dist.get_rank()}: {first_line(error)}"
        ) from error
    COUNTS.add(operator, 1, 1)


def _open_larger(group: dist.ProcessGroup, needed: int, time_limit: float) -> Any:
    doubled = min(2 * _SHARED[group].half_bytes, PIECE_BYTES)
    opened = _open(group, max(needed, doubled), time_limit)
    if isinstance(opened, str):
        raise CollectiveError(
            f"shm on {describe(group)}: no room for 2 x {needed} bytes a rank ({opened}); "
            "make /dev/shm larger, or set USE_COC_FUSED_KERNEL=0"
        )
    return opened


def _open(group: dist.ProcessGroup, half_bytes: int, time_limit: float) -> Any:
    """Create a segment on the first rank, open it on the others, collect all reports, and unlink its name.

    Returns the communicator, or the failures' reports; all ranks return the same kind.
    """
    name, communicator, first = "", None, group.rank() == 0

    def reports(mine: str) -> list[str]:
        """Return the text of each rank; no rank goes on before all have come."""
        by_rank = store_all_gather(
            group,
            "the opening of shared memory",
            {"report": mine},
            CollectiveError,
            topic="shm",
            hint="it has stopped, or never came to the operator",
            limit=time_limit,
        )
        return [value["report"] for value in by_rank.values()]

    def opened() -> str:
        nonlocal communicator
        try:
            communicator = _communicator(name, group, half_bytes)
        except (RuntimeError, OSError) as error:
            return f"rank {dist.get_rank()}: {first_line(error)}"
        return ""

    try:
        # The segment is created after all ranks know its name: any of them can unlink it if the first rank ends.
        name = reports(f"/ascend_parallel-{secrets.token_hex(16)}" if first else "")[0]
        failures = reports(opened() if first else "")
        if not any(failures):
            failures = reports("" if first else opened())
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"shm on {describe(group)}: the group's store failed: {first_line(error)}") from error
    finally:
        # Every rank unlinks, since any rank may have ended. All ranks have opened the segment, or this rank gave up.
        _unlink(name)
    return "; ".join(filter(None, failures)) or communicator


def _communicator(name: str, group: dist.ProcessGroup, half_bytes: int) -> Any:
    module = extension()
    if isinstance(module, str):
        raise RuntimeError(module)
    return module.Communicator(name, group.rank(), dist.get_process_group_ranks(group), half_bytes)


def _unlink(name: str) -> None:
    module = extension()
    if name and not isinstance(module, str):
        module.unlink(name)
