"""The three operators, started: checked, given a kernel and chunks, and left pending where that helps.

This is what `linear` calls. Operands have any number of leading dimensions here; kernels see rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ascend_parallel.ops import chunked, npu, reference, shm
from ascend_parallel.ops.alignment import align_operands
from ascend_parallel.ops.bits import ANY, keep_bits
from ascend_parallel.ops.collectives import on_gloo
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem, problem_of
from ascend_parallel.ops.quantised import Weight
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.ops.registry import FUSED, KERNELS, Choice, choose, name_of, usual_chunks
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.ops.settings import OperatorSettings

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("ascend_parallel")


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function whose operands have their dtypes already: autocast would treat mm and mm(out=) apart."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


@without_autocast
def start_matmul_all_reduce(
    x: torch.Tensor, w: Weight, group: dist.ProcessGroup, settings: OperatorSettings, *, layout: str = ANY
) -> Pending:
    """Start ``sum over ranks of x w``: x [..., K], w [K, N], perhaps in int8; the pending result is [M, N].

    `layout` says how w lies in memory (ops/bits.py), the same on every rank.
    """
    x_m, w, choice = _prepare(ALL_REDUCE, x, w, group, settings, layout)
    pending: Pending = _run(choice, x_m, w, group)
    return pending


@without_autocast
def start_matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    after: Pending | None = None,
    *,
    layout: str = ANY,
) -> Pending:
    """Start this rank's rows of ``sum over ranks of x w``: x [..., K], w [K, N]; pending [M / R, N].

    `after` is a collective of the same group that was started before and is to be done first. Backends
    that run collectives in their order see to that by themselves; gloo runs them at the same time.
    `layout` as for `start_matmul_all_reduce`.
    """
    x_m, right, choice = _prepare(REDUCE_SCATTER, x, w, group, settings, layout)
    if after is not None and not on_gloo(group, x.device):
        after = None
    pending: Pending = _run(choice, x_m, right, group, after)
    return pending


@without_autocast
def run_all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    keep_gathered: bool = True,
    *,
    layout: str = ANY,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``gather(x) w`` and gather(x): x [..., K], w [K, N]; [M, N] and [M, K], both finished.

    With keep_gathered=False the second may be None: fused kernels then need not write it. `layout` as for
    `start_matmul_all_reduce`.
    """
    x_m, right, choice = _prepare(ALL_GATHER, x_shard, w, group, settings, layout)
    y_m, gathered_m = _run(choice, x_m, right, group, keep_gathered=keep_gathered)
    return y_m, gathered_m


def start_gather_rows(x_shard: torch.Tensor, group: dist.ProcessGroup, settings: OperatorSettings) -> Pending:
    """Start gathering x [..., K] as rows; the pending result is [M, K], this rank's M / R rows among them."""
    x_m = rows_of(x_shard)
    sizes = split_rows(x_m.shape[0], usual_chunks(settings))
    pending: Pending = (chunked if len(sizes) > 1 else reference).gather_rows(x_m, group, sizes)
    return pending


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as rows ``[M, K]``: a view unless the strides of x forbid one."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def shaped(y_m: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Give rows their final shape without making a view of them.

    Autograd forbids in-place changes of a view that a custom function returns, and Megatron's
    cross-entropy changes its logits in place. The rows themselves must not be used afterwards.
    """
    y: torch.Tensor = torch.ops.aten._unsafe_view(y_m, list(shape))
    return y


def gathered_shape(shape: torch.Size, ranks: int, last: int) -> tuple[int, ...]:
    """Shape of a result whose first dimension is gathered over `ranks` and whose last one is `last`."""
    return (shape[0] * ranks, *shape[1:-1], last)


def scattered_shape(shape: torch.Size, ranks: int, last: int) -> tuple[int, ...]:
    """Shape of a result whose first dimension is scattered over `ranks` and whose last one is `last`."""
    return (shape[0] // ranks, *shape[1:-1], last)


def _run(choice: Choice, x_m: torch.Tensor, w: Weight, group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
    """Call the chosen kernel, and have it recorded if somebody records."""
    problem = choice.problem
    kernel = getattr(KERNELS[choice.kernel], problem.operator)
    options |= dict(choice.options)
    recorder = RECORDING.recorder
    if recorder is None:
        return kernel(x_m, w, group, choice.sizes, *args, **options)
    with recorder.call(recorded(choice), problem.device, group, fused=choice.kernel in FUSED):
        return kernel(x_m, w, group, choice.sizes, *args, **options)


def recorded(choice: Choice) -> dict[str, object]:
    """What a record says of a call."""
    problem = choice.problem
    shape = {"operator": problem.operator, "m": problem.m, "k": problem.k, "n": problem.n}
    dtype = str(problem.dtype).removeprefix("torch.")
    return {**shape, "dtype": dtype, "kernel": choice.kernel, "chunks": len(choice.sizes)}


@functools.lru_cache(maxsize=4096)
def _say_once(choice: Choice, rank: int) -> None:
    """Log each choice when it is first made, on rank 0; one that is not what was asked for as a warning, once."""
    if rank != 0:
        return
    log.info("%s: %s, chunks: %d (%s)", name_of(choice.problem), choice.kernel, len(choice.sizes), choice.reason)
    if choice.unmet:
        _warn_once(choice.unmet)


@functools.lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    log.warning("%s", reason)


def choice_for(
    problem: Problem, group: dist.ProcessGroup, settings: OperatorSettings, device: torch.device, layout: str = ANY
) -> Choice:
    """Return how a call on `group` runs; the first time, its ranks are asked together what they have to be asked."""
    if settings.fused and problem.device == "cpu":
        problem = shm.ask(problem, group, float(settings.time_limit))
    elif settings.fused and problem.device == "npu":
        problem = replace(problem, soc=npu.soc_name())
    return keep_bits(choose(problem, settings), group, device, layout)


def _prepare(
    operator: str, x: torch.Tensor, w: Weight, group: dist.ProcessGroup, settings: OperatorSettings, layout: str
) -> tuple[torch.Tensor, Weight, Choice]:
    problem = problem_of(operator, x, w, group)
    choice = choice_for(problem, group, settings, x.device, layout)
    _say_once(choice, dist.get_rank())
    x_m = rows_of(x)
    # Not where x is gathered: the filling would be sent too. Nor in tiles: it depends on the chunks.
    aligns = settings.matmul_soc_friendly and problem.device == "npu" and operator != ALL_GATHER
    if choice.kernel == "chunked" and aligns and not settings.deterministic and isinstance(w, torch.Tensor):
        x_m, w = align_operands(x_m, w, problem.rows // len(choice.sizes), settings.k_min, settings.k_max)
    return x_m, w, choice
