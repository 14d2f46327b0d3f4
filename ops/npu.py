"""The three operators as torch_npu's fused kernels on Ascend NPUs.

    matmul_all_reduce      npu_mm_all_reduce_base
    matmul_reduce_scatter  npu_mm_reduce_scatter_base
    all_gather_matmul      npu_all_gather_base_mm

Call an operator only if `supports` returns None: torch_npu checks few limits. The fused kernels cut rows on
the device, so `sizes` is unused. Results are `Pending` without works: later kernels on the same stream see them
finished.

Only this file imports torch_npu, at the first call. The limits and their sources are in ops/soc.py and docs/npu.md.
None of this was run on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.soc import GENERATIONS, RANKS

DTYPES = (torch.float16, torch.bfloat16)

# Smallest and largest K of a call. op-plugin 7.3.0's pages give [1, 2147483647] and the half-open [256, 65535).
K_RANGE = {ALL_REDUCE: (1, 2**31 - 1), REDUCE_SCATTER: (256, 65534), ALL_GATHER: (256, 65534)}

# Largest K and N of npu_mm_all_reduce_base with an int8 weight, from its page; the other operators take no int8.
LARGEST_ANTIQUANT = 65535

# Largest M and N of npu_mm_all_reduce_base, from its page; the other two pages name none.
LARGEST_SIDE = {ALL_REDUCE: 2**31 - 1}

# HCCL names by group. They live as long as the group, because the operators keep a pointer to the characters.
_HCCL_NAMES: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def supports(problem: Problem) -> str | None:
    """Return the reason why the fused operator cannot run `problem`, or None if it can.

    A pure function of values that are the same on every rank. K is checked for this call only: a layer's
    backward contracts over another dimension and has its own check.
    """
    return next(_refusals(problem), None)


def matmul_all_reduce(
    x_m: torch.Tensor, w: Weight, group: dist.ProcessGroup, sizes: Sizes, *, comm_mode: str | None = None
) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w)``: x_m [M, K], w [K, N]; pending [M, N]. An int8 weight is not dequantised.

    `comm_mode` is passed on unless it is None (it needs a newer CANN).
    """
    y_m = _torch_npu().npu_mm_all_reduce_base(
        x_m.contiguous(),
        _weight(w.values if isinstance(w, QuantisedWeight) else w),
        hccl_name(group),
        reduce_op="sum",
        comm_turn=0,
        **_scales(w),
        **_mode(comm_mode),
    )
    COUNTS.add(ALL_REDUCE, 1, 1)
    return Pending(y_m, ALL_REDUCE, group)


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    comm_mode: str | None = None,
) -> Pending:
    """Start ``y_shard_m = reduce_scatter(x_m @ w)``: x_m [M, K], w [K, N]; pending [M / R, N].

    Nothing is sent before `after` is done. `comm_mode`: "ai_cpu", "aiv", or None for the operator's default.
    """
    if after is not None:
        after.wait()
    y_shard_m = _torch_npu().npu_mm_reduce_scatter_base(
        x_m.contiguous(),  # positional: the schema names it `input`, the documentation also x1
        _weight(w),
        hccl_name(group),
        group.size(),
        reduce_op="sum",
        comm_turn=0,
        **_mode(comm_mode),
    )
    COUNTS.add(REDUCE_SCATTER, 1, 1)
    return Pending(y_shard_m, REDUCE_SCATTER, group)


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    keep_gathered: bool = True,
    comm_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``x_m @ w`` [M, N] and ``x_m = all_gather(x_shard_m)`` [M, K]: x_shard_m [M / R, K], w [K, N].

    With keep_gathered=False, for a column layer that gathers again in backward, the gathered rows are not stored:
    the second result is None. `comm_mode`: "ai_cpu", "aiv", or None for the operator's default.
    """
    y_m, gathered_m = _torch_npu().npu_all_gather_base_mm(
        x_shard_m.contiguous(),
        _weight(w),
        hccl_name(group),
        group.size(),
        gather_index=0,
        gather_output=keep_gathered,
        comm_turn=0,
        **_mode(comm_mode),
    )
    COUNTS.add(ALL_GATHER, 1, 1)
    return y_m, gathered_m if keep_gathered else None


def hccl_name(group: dist.ProcessGroup) -> str:
    """Return HCCL's name of `group`, from its NPU backend; cached."""
    name = _HCCL_NAMES.get(group)
    if name is None:
        backend: Any = group._get_backend(torch.device("npu"))
        name = str(backend.get_hccl_comm_name(dist.get_rank()))
        _HCCL_NAMES[group] = name
    return name


def set_hccl_name(group: dist.ProcessGroup, name: str) -> None:
    """Set HCCL's name of `group` without asking its backend (in tests the backend is gloo)."""
    _HCCL_NAMES[group] = name


@lru_cache(maxsize=1)
def soc_name() -> str:
    """Return the name of this machine's chip, such as ``"Ascend910B1"``; without a chip torch_npu raises its error."""
    name: str = _torch_npu().npu.get_device_name()
    return name


def _refusals(problem: Problem) -> Iterator[str]:
    """Yield the reasons why the fused operator cannot run `problem`."""
    operator, deterministic = problem.operator, "which COC_DETERMINISTIC=1 requires"
    if problem.device != "npu":
        yield f"device {problem.device}, not npu"
    if problem.dtype not in DTYPES:
        yield f"{operator} takes {' or '.join(map(str, DTYPES))}, not {problem.dtype}"
    yield from _chip_refusals(problem)
    smallest, largest = K_RANGE[operator]
    if not smallest <= problem.k <= largest:
        yield f"{operator} takes K from {smallest} to {largest}, not {problem.k}"
    for side, size in (("M", problem.m), ("N", problem.n)):
        if size < 1:  # documented for all-reduce; elsewhere an empty call gains nothing
            yield f"{operator} takes no empty operand, and {side} is {size}"
        if size > LARGEST_SIDE.get(operator, size):
            yield f"{operator} takes {side} up to {LARGEST_SIDE[operator]}, not {size}"
    if operator != ALL_REDUCE and problem.m % problem.ranks:
        yield f"{operator} needs M divisible by the {problem.ranks} ranks, and M is {problem.m}"
    if problem.antiquant:
        yield from _antiquant_refusals(problem)
    if problem.deterministic and operator == ALL_GATHER:
        yield f"its matmul is not in row tiles, {deterministic}"
    if problem.deterministic:  # a fused matmul cannot be tiled, and the order of its sums is undocumented
        yield f"{operator} is not documented to sum in rank order, {deterministic}"


def _chip_refusals(problem: Problem) -> Iterator[str]:
    """Refuse combinations of chip, operator and number of ranks that are not documented."""
    if not problem.soc:
        yield "the chip is unknown, and so are its operators and their rank counts"
    elif problem.soc not in GENERATIONS:
        yield f"no fused operator is documented for the chip {problem.soc}"
    else:
        generation = GENERATIONS[problem.soc]
        where, allowed = f"{problem.soc} (generation {generation})", RANKS[generation].get(problem.operator)
        if allowed is None:
            yield f"{problem.operator} is not documented for {where}"
        elif problem.ranks not in allowed:
            yield f"{problem.operator} on {where} takes {', '.join(map(str, allowed))} ranks, not {problem.ranks}"


def _antiquant_refusals(problem: Problem) -> Iterator[str]:
    """Refuse an int8 weight whose shape, groups or scales are outside the documented limits."""
    for side, size in (("K", problem.k), ("N", problem.n)):
        if size > LARGEST_ANTIQUANT:
            yield f"{problem.operator} with an int8 weight takes {side} up to {LARGEST_ANTIQUANT}, not {size}"
    if problem.group_size >= problem.k:
        yield f"{problem.operator} takes groups of at most K - 1 = {problem.k - 1}, not {problem.group_size}"
    if problem.scale_dtype != problem.dtype:
        yield f"{problem.operator} takes scales of the dtype of x, {problem.dtype}, not {problem.scale_dtype}"


def _torch_npu() -> Any:
    """Import torch_npu; the import also registers its operators."""
    import torch_npu

    return torch_npu


def _weight(w: torch.Tensor) -> torch.Tensor:
    """Return the right operand if it or its transpose is contiguous, else a copy; the left has to be contiguous."""
    return w if w.is_contiguous() or w.t().is_contiguous() else w.contiguous()


def _scales(w: Weight) -> dict[str, Any]:
    """Return the arguments that describe an int8 weight; none for a plain weight."""
    if not isinstance(w, QuantisedWeight):
        return {}
    offset = {} if w.offset is None else {"antiquant_offset": w.offset.contiguous()}
    return {"antiquant_scale": w.scale.contiguous(), **offset, "antiquant_group_size": w.group_size}


def _mode(comm_mode: str | None) -> dict[str, str]:
    """Return the argument `comm_mode`, or none if it is None: an older torch_npu does not know it."""
    return {} if comm_mode is None else {"comm_mode": comm_mode}
