"""The fused kernel for CPU ranks of one host: rows pass through shared memory, written where the peers read them.

Each rank's matmul writes its rows straight into a stage that all ranks map; sums are taken there, in
rank order and in fp32, so the result is the same on all ranks, in every run, for every number of ranks.
The C++ part is in csrc/ (communicator.h has the protocol); here is how ranks come to share a segment.

Whether a group can is found out by trying, once, by all its ranks together: a host name proves nothing.
"""

from __future__ import annotations

import importlib
import secrets
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import CollectiveError, Pending, describe
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.rows import Sizes

MAX_RANKS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIRST_BYTES = 1 << 20
TIME_LIMIT = 300.0


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
    if not 2 <= problem.ranks <= MAX_RANKS:
        return f"{problem.ranks} ranks, not 2 to {MAX_RANKS}"
    return problem.shm


def reach(group: dist.ProcessGroup) -> str | None:
    """Find out, with all ranks of `group`, whether they can share memory; None if so, else the reason.

    The answer is the same on every rank: it is made of every rank's report.
    """
    if group not in _SHARED:
        _SHARED[group] = _open(group, FIRST_BYTES)
    shared = _SHARED[group]
    return shared if isinstance(shared, str) else None


def matmul_all_reduce(x_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """``[M, K] x [K, N]``, then the sum over ranks in rank order: [M, N], finished, the same on every rank."""
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    # The rows, and at most as many again for the sums of one rank's part.
    _run(ALL_REDUCE, group, 2 * y_m.nbytes, x_m, w, y_m)
    return Pending(y_m, ALL_REDUCE, group)


def matmul_reduce_scatter(
    x_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, after: Pending | None = None
) -> Pending:
    """``[M, K] x [K, N]``, then this rank's M / R rows of the sum in rank order: [M / R, N], finished."""
    y_shard_m = x_m.new_empty(x_m.shape[0] // group.size(), w.shape[1])
    _run(REDUCE_SCATTER, group, group.size() * y_shard_m.nbytes, x_m, w, y_shard_m)
    return Pending(y_shard_m, REDUCE_SCATTER, group)


def all_gather_matmul(
    x_shard_m: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, *, keep_gathered: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Every rank's ``[M / R, K]`` rows, read where they lie, times ``[K, N]``: [M, N], and [M, K] if kept."""
    rows = group.size() * x_shard_m.shape[0]
    y_m = x_shard_m.new_empty(rows, w.shape[1])
    gathered = x_shard_m.new_empty(rows, x_shard_m.shape[1]) if keep_gathered else None
    _run(ALL_GATHER, group, x_shard_m.nbytes, x_shard_m, w, y_m, gathered)
    return y_m, gathered


def _run(operator: str, group: dist.ProcessGroup, needed: int, *tensors: torch.Tensor | None) -> None:
    communicator = _with_room(group, needed)
    try:
        getattr(communicator, operator)(*tensors)
    except RuntimeError as error:
        raise CollectiveError(
            f"shm {operator} on {describe(group)} failed on rank {dist.get_rank()}: {error}"
        ) from error
    COUNTS.add(operator, 1, 1)


def _with_room(group: dist.ProcessGroup, needed: int) -> Any:
    """Return the group's communicator, with a larger segment if `needed` bytes, the same on all ranks, ask for it."""
    communicator = _SHARED[group]
    assert not isinstance(communicator, str), "chosen without asking reach()"
    if needed > communicator.half_bytes:
        communicator = _open(group, max(needed, 2 * communicator.half_bytes))
        if isinstance(communicator, str):
            raise CollectiveError(f"shm on {describe(group)}: no room for {needed} bytes a rank: {communicator}")
        _SHARED[group] = communicator
    return communicator


def _open(group: dist.ProcessGroup, half_bytes: int) -> Any:
    """Make a segment on the first rank, open it on the others, hear from all, and take its name away.

    Returns the communicator, or the reports of what failed.
    """
    store = c10d._get_process_group_store(group)
    rank, ranks = group.rank(), group.size()
    # Counted in the store, so that a group made anew on it never reads what an earlier one left there.
    prefix = f"ascend_parallel/shm/{store.add(f'ascend_parallel/shm/opened/{rank}', 1)}"
    if rank == 0:
        store.set(f"{prefix}/name", f"/ascend_parallel-{secrets.token_hex(16)}")
    name = store.get(f"{prefix}/name").decode()
    made: Any = None
    report = ""
    if rank != 0:
        store.wait([f"{prefix}/made"])
    try:
        made = _communicator(name, rank, ranks, half_bytes)
    except (RuntimeError, OSError) as error:
        report = f"rank {rank}: {str(error).partition(chr(10))[0]}"
    if rank == 0:
        store.set(f"{prefix}/made", "1")
    store.set(f"{prefix}/report/{rank}", report)
    try:
        reports = [store.get(f"{prefix}/report/{other}").decode() for other in range(ranks)]
    finally:
        if rank == 0 and made is not None:
            _unlink(name)
    return "; ".join(filter(None, reports)) or made


def _communicator(name: str, rank: int, ranks: int, half_bytes: int) -> Any:
    module = extension()
    if isinstance(module, str):
        raise RuntimeError(module)
    return module.Communicator(name, rank, ranks, half_bytes, TIME_LIMIT)


def _unlink(name: str) -> None:
    module = extension()
    assert not isinstance(module, str)
    module.unlink(name)
