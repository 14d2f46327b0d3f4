"""Start the three operators: check the operands, choose a kernel and chunks, and return pending results.

The layers (ascend_parallel.overlap.linear) call these functions. Operands have any number of leading dimensions;
kernels get rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops import chunked, npu, reference, shm
from ascend_parallel.ops.bits import keep_bits
from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.deferred import DeferredProduct
from ascend_parallel.ops.module_weight import ModuleWeight
from ascend_parallel.ops.multiply import MultipliedRows, NoProduct, align_operands
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.probing import ANY
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem, problem_of
from ascend_parallel.ops.quantised import Weight, dequantised_weight
from ascend_parallel.ops.quantised_rows import Input, QuantisedRows
from ascend_parallel.ops.record import BESIDE, RECORDING, compute
from ascend_parallel.ops.registry import (
    FUSED,
    KERNELS,
    Choice,
    choose,
    name_of,
    own_rows_suffice,
    too_narrow,
    usual_chunks,
)
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.ops.unfinished import finished

P = ParamSpec("P")
T = TypeVar("T")


# Kernels that multiply a deferred product, and add to it.
ADDING = ("chunked", "reference")
# A group's choices to keep: shapes can vary without end.
MOST_CHOICES = 4096
_CHOICES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], Choice]] = WeakKeyDictionary()

log = logging.getLogger("ascend_parallel")


_NOTHING: AbstractContextManager[object] = nullcontext()


def autocast_off(x: Input) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of x: autocast would treat mm and mm(out=) differently."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` in `autocast_off` of its first tensor; operands are cast before."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with autocast_off(next(arg for arg in args if isinstance(arg, (torch.Tensor, QuantisedRows)))):
            return function(*args, **kwargs)

    return run


class OperatorCall(NamedTuple):
    """What an operator multiplies, and how.

    x, w
        The operands: x [..., K], w [K, N].
    layout
        The memory layout of w (ops/bits.py), the same on every rank.
    comm_scales
        The scales of an exchange in int8.
    parts
        Of a fused weight, as in `Problem`.
    product
        ``x @ w`` [M, N], if the caller has multiplied; the operator then reads the shape, dtype and device of x and no
        value of it. A `DeferredProduct` has operands of its own, which the kernel multiplies.
    """

    operator: str
    x: Input
    w: Weight | ModuleWeight
    group: dist.ProcessGroup
    settings: OperatorSettings
    layout: str = ANY
    comm_scales: CommScales | None = None
    parts: tuple[int, ...] = ()
    product: torch.Tensor | None = None


def start_matmul_all_reduce(
    x: Input,
    w: Weight | ModuleWeight,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    *,
    layout: str = ANY,
    comm_scales: CommScales | None = None,
    parts: tuple[int, ...] = (),
    product: torch.Tensor | None = None,
) -> Pending:
    """Start ``all_reduce(x @ w)``: x [..., K], w [K, N], w or both in int8, or a module's; pending [M, N].

    `layout` is the memory layout of w (ops/bits.py), the same on every rank. With `comm_scales`, allowed for int8 by
    int8, the ranks exchange int8: sums are rounded. `parts` as in `Problem`. `product` as in `OperatorCall`; other
    ranks may multiply here, as long as they call with operands of the same shapes.
    """
    with autocast_off(x):
        call = OperatorCall(ALL_REDUCE, x, w, group, settings, layout, comm_scales, parts, product)
        x_m, right, choice = _prepare(call)
        kernel, options = kernel_of(choice), dict(choice.options)
        if comm_scales is not None:
            options["comm_scales"] = comm_scales
        if product is not None and (addends := _addends(call, choice)):
            options["addends"] = addends
        with in_timeline(choice, group):
            pending: Pending = kernel(x_m, right, group, choice.sizes, **options)
    return pending


def start_matmul_reduce_scatter(
    x: Input,
    w: Weight,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    after: Pending | None = None,
    *,
    layout: str = ANY,
    addends: Sequence[torch.Tensor] = (),
    parts: tuple[int, ...] = (),
    product: torch.Tensor | None = None,
) -> Pending:
    """Start ``reduce_scatter(x @ w + addends)``: x [..., K], w [K, N], or both in int8; pending [M / R, N].

    The `addends` [M, N] are added to this rank's product; fused kernels, which settings alone request, cannot add them.

    `after` is an earlier collective of the same group that must finish first, where the backend runs collectives at
    the same time. `layout`, `parts` and `product` as in
    `start_matmul_all_reduce`.
    """
    with autocast_off(x):
        call = OperatorCall(REDUCE_SCATTER, x, w, group, settings, layout, parts=parts, product=product)
        x_m, right, choice = _prepare(call)
        kernel, options = kernel_of(choice), dict(choice.options)
        if product is not None:
            addends = _addends(call, choice)
        if addends:
            settings.arithmetic.refuse("layers that share a gather do not sum their gradients in a tree")
            options["addends"] = addends
        with in_timeline(choice, group):
            pending: Pending = kernel(x_m, right, group, choice.sizes, after, **options)
    return pending


def run_all_gather_matmul(
    x_shard: Input,
    w: Weight,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    keep_gathered: bool = True,
    *,
    layout: str = ANY,
    each: chunked.EachRows | None = None,
    parts: tuple[int, ...] = (),
    multiplies: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``all_gather(x_shard) @ w`` [M, N] and ``all_gather(x_shard)`` [M, K]: w [K, N].

    x_shard and w may both be in int8; keep_gathered is then False. With keep_gathered=False the second result may be
    None: fused kernels then need not store it. `layout` and `parts` as in `start_matmul_all_reduce`. `each` is called
    for the rows of each chunk; the chunked kernel alone does so. With multiplies=False the collectives run alone, those
    that other ranks run around their matmul, and the first result is undefined; of w only shape and dtype count.
    """
    assert not (keep_gathered and isinstance(x_shard, QuantisedRows)), "gathered int8 rows are not kept"
    with autocast_off(x_shard):
        x_m, right, choice = _prepare(OperatorCall(ALL_GATHER, x_shard, w, group, settings, layout, parts=parts))
        kernel, options = kernel_of(choice), dict(choice.options)
        if not multiplies and choice.kernel not in FUSED:  # a fused kernel takes no weight but a tensor
            right = NoProduct(w.shape)
        if choice.kernel == "chunked":
            options["each"] = each
        with in_timeline(choice, group):
            y_m, gathered_m = kernel(x_m, right, group, choice.sizes, keep_gathered=keep_gathered, **options)
    return y_m, gathered_m


def start_gather_rows(
    x_shard: torch.Tensor, group: dist.ProcessGroup, settings: OperatorSettings, other: int
) -> Pending:
    """Start ``all_gather(x_shard)``: x_shard [..., K] as M / R rows; pending [M, K].

    other: the features on the other side of the matmul that reads the rows.
    """
    x_m = rows_of(x_shard)
    (rows, features), ranks = x_m.shape, group.size()
    sizes = _gathered_sizes(rows, features, other, ranks, x_m.device.type, settings.for_operators)
    if len(sizes) > 1:  # whether rows are unfinished may differ between ranks, and decides nothing
        return chunked.start_gathers(x_m, group, sizes, "all_gather")[0]
    return reference.gather_rows(x_m, group, "all_gather")


@functools.lru_cache(maxsize=4096)
def _gathered_sizes(rows: int, features: int, other: int, ranks: int, device: str, settings: OperatorSettings) -> Sizes:
    """Return the rows of each chunk of an all-gather of `rows` of so many features, as of `start_gather_rows`."""
    # The first as where another rank multiplies the rows that it gathers.
    if own_rows_suffice(ranks, device) or too_narrow(features, other):
        return (rows,)
    return split_rows(rows, usual_chunks(settings), settings.chunk_rows)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as rows [M, K]: a view unless the strides of x forbid a view."""
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def shaped(y_m: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the rows in their final shape, not as a view.

    Autograd forbids in-place changes of a view that a custom function returns, and Megatron's
    cross-entropy changes its logits in place. The caller must not use `y_m` afterwards.
    """
    y: torch.Tensor = torch.ops.aten._unsafe_view(y_m, list(shape))
    return y


def gathered_shape(shape: torch.Size, ranks: int, last: int) -> tuple[int, ...]:
    """Return the shape with its first dimension gathered over `ranks` and its last dimension replaced by `last`."""
    return (shape[0] * ranks, *shape[1:-1], last)


def scattered_shape(shape: torch.Size, ranks: int, last: int) -> tuple[int, ...]:
    """Return the shape with its first dimension scattered over `ranks` and its last dimension replaced by `last`."""
    return (shape[0] // ranks, *shape[1:-1], last)


def kernel_of(choice: Choice) -> Callable[..., Any]:
    """Return the function of the chosen kernel: ``kernel(x_m, w, group, sizes, ...)``."""
    kernel: Callable[..., Any] = getattr(KERNELS[choice.kernel], choice.problem.operator)
    return kernel


def in_timeline(choice: Choice, group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a context that records the call of the chosen kernel, if a recorder is active."""
    recorder = RECORDING.recorder
    if recorder is None:
        return _NOTHING
    return recorder.call(recorded(choice), choice.problem.device, group, fused=choice.kernel in FUSED)


def recorded(choice: Choice) -> dict[str, object]:
    """Return the fields of a call in a timeline record."""
    problem = choice.problem
    shape = {"operator": problem.operator, "m": problem.m, "k": problem.k, "n": problem.n}
    dtype = str(problem.dtype).removeprefix("torch.")
    return {**shape, "dtype": dtype, "kernel": choice.kernel, "chunks": len(choice.sizes)}


@functools.lru_cache(maxsize=4096)
def log_once(choice: Choice) -> None:
    """Log each new choice on rank 0; warn, once for each reason, if it does not meet the user's request."""
    if dist.get_rank() != 0:
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
    """Return kernel and chunks of a call on `group`; at the first call of a shape its ranks may communicate."""
    if settings.fused:
        problem = with_fused_limits(problem, group, float(settings.time_limit))
    return keep_bits(choose(problem, settings), group, device, layout)


def with_fused_limits(problem: Problem, group: dist.ProcessGroup, time_limit: float = shm.TIME_LIMIT) -> Problem:
    """Return `problem` with what decides whether the fused kernel of its device runs it; every rank calls this."""
    if problem.device == "cpu":
        return shm.ask(problem, group, time_limit)
    return npu.ask(problem) if problem.device == "npu" else problem


def _new_choice(call: OperatorCall) -> Choice:
    """Check the operands, and choose kernel and chunks."""
    if isinstance(call.w, ModuleWeight):
        return _choice_of_module(call, call.w)
    problem = replace(problem_of(call.operator, call.x, call.w, call.group), parts=call.parts)
    if call.comm_scales is not None:
        problem = replace(problem, comm_quant=True)
        call.comm_scales.check(call.operator, problem.n, problem.dtype, call.x.device)
    choice = choice_for(problem, call.group, call.settings, call.x.device, call.layout)
    log_once(choice)
    return choice


def _choice_of_module(call: OperatorCall, w: ModuleWeight) -> Choice:
    """Return the chunks that a module's weight asks for: its kernel is not one of those that `choose` knows."""
    problem = problem_of(call.operator, call.x, w, call.group)
    sizes = w.cut(problem.m)
    kernel = "chunked" if len(sizes) > 1 else "reference"
    return Choice(problem, kernel, sizes, None, "the module multiplies, in chunks of its own", given=True)


def _choice_of_operands(call: OperatorCall) -> Choice:
    """Return `_new_choice`, kept for later calls with such operands: the checks and the choice depend on the key alone.

    The choices of int8 weights, and of fused kernels, which may open shared memory, are not kept here.
    """
    operator, x, w, group, settings, layout, comm_scales, parts, _ = call
    if settings.fused or not isinstance(w, torch.Tensor) or comm_scales is not None:
        return _new_choice(call)
    kept = _CHOICES.get(group)
    if kept is None:
        kept = _CHOICES[group] = {}
    key = (operator, type(x), x.shape, x.dtype, x.device, type(w), w.shape, w.dtype, w.device, settings, layout, parts)
    choice = kept.get(key)
    if choice is None:
        choice = _new_choice(call)
        if len(kept) == MOST_CHOICES:
            kept.clear()
        kept[key] = choice
    return choice


def _prepare(call: OperatorCall) -> tuple[Input, Weight | ModuleWeight | MultipliedRows | NoProduct, Choice]:
    """Return the operands as the chosen kernel takes them, and the choice."""
    x, w, settings = call.x, call.w, call.settings
    choice = _choice_of_operands(call)
    deferred = None if call.product is None else _deferred(call, choice)
    if deferred is not None:
        deferred.check()
        x, w = deferred.x, deferred.w
    elif call.product is not None:
        columns = call.product.shape[-1]
        fused = choice.kernel in FUSED  # which takes no weight but a tensor: the identity changes no bit
        weight = torch.eye(columns, dtype=x.dtype, device=x.device) if fused else MultipliedRows(columns)
        return rows_of(finished(call.product)), weight, choice
    if isinstance(x, QuantisedRows):
        if choice.kernel == "npu":
            return x.rows(), w, choice
        assert not isinstance(w, ModuleWeight)
        x, w = compute(BESIDE, "dequantise", _dequantised, x, w)
    problem, x_m = choice.problem, rows_of(x)
    # An all-gather would also send the padding. Padding depends on the chunks, which deterministic tiles forbid.
    aligns = settings.matmul_soc_friendly and problem.device == "npu" and call.operator != ALL_GATHER
    if choice.kernel == "chunked" and aligns and not settings.deterministic and isinstance(w, torch.Tensor):
        x_m, w = align_operands(x_m, w, problem.rows // len(choice.sizes), settings.k_min, settings.k_max)
    return x_m, w, choice


def _deferred(call: OperatorCall, choice: Choice) -> DeferredProduct | None:
    """Return the product of the call if its kernel is to multiply it, in chunks, and can add to it."""
    product = call.product
    if not isinstance(product, DeferredProduct) or product.multiplied or choice.kernel not in ADDING:
        return None
    return product if (product.x.shape, product.w.shape) == (call.x.shape, call.w.shape) else None


def _addends(call: OperatorCall, choice: Choice) -> list[torch.Tensor]:
    """Return what is added to a deferred product, as rows."""
    deferred = _deferred(call, choice)
    return [] if deferred is None else [rows_of(addend) for addend in deferred.addends]


def _dequantised(x: QuantisedRows, w: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    return x.dequantise(), dequantised_weight(w, x.dtype)
