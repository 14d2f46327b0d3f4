"""The three operators: decide how one runs on its operands; start it as was decided, and return pending results.

The layers (ascend_parallel.overlap.linear) call these functions. Operands have any number of leading dimensions;
kernels get rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ascend_parallel.ops import chunked, npu, reference, shm, stream_limit
from ascend_parallel.ops.bits import keep_bits
from ascend_parallel.ops.call import ALL_REDUCE, Exchange, Matmul, matmul_of
from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.decision import MOST_DECIDED, NOTHING, OF_GROUPS, Decision, Known, OfGroup, because, of_group
from ascend_parallel.ops.deferred import DeferredProduct
from ascend_parallel.ops.module_weight import ModuleWeight
from ascend_parallel.ops.multiply import MultipliedRows, NoProduct, align_operands
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.probing import ANY
from ascend_parallel.ops.quantised import Weight, dequantised_weight
from ascend_parallel.ops.quantised_rows import Input, QuantisedRows
from ascend_parallel.ops.record import BESIDE, RECORDING, compute
from ascend_parallel.ops.registry import (
    FUSED,
    KERNELS,
    choose,
    too_narrow,
    usual_chunks,
)
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.ops.stream_limit import FOLLOWED
from ascend_parallel.ops.unfinished import finished
from ascend_parallel.process_groups.backend import usual_backend

P = ParamSpec("P")
T = TypeVar("T")


# Kernels that multiply a deferred product, and add to it.
ADDING = ("chunked", "reference")
log = logging.getLogger("ascend_parallel")


_NOTHING: AbstractContextManager[object] = nullcontext()


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Tells whether autocast is on for some device: a cheaper question than that of one device, which rarely follows."""


def autocast_off(x: Input) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of x: autocast would treat mm and mm(out=) differently."""
    if not any_autocast() or not torch.is_autocast_enabled(device := x.device.type):
        return _NOTHING
    return torch.autocast(device, enabled=False)


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` in `autocast_off` of its first tensor; operands are cast before."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with autocast_off(next(arg for arg in args if isinstance(arg, (torch.Tensor, QuantisedRows)))):
            return function(*args, **kwargs)

    return run


def decided(
    operator: str,
    x: Input,
    w: Weight,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    known: Known | None = None,
    *,
    layout: str = ANY,
    comm_scales: CommScales | None = None,
    parts: tuple[int, ...] = (),
) -> Decision:
    """Decide how `operator` of x [..., K] and w [K, N] runs; at the first call of a shape the ranks may communicate.

    known
        What decides beside the settings, as of `choose`.
    layout
        The memory layout of w (ops/bits.py), the same on every rank.
    comm_scales
        The scales of an exchange in int8, allowed for int8 by int8.
    parts
        Of a fused weight, as in `Matmul`.

    Kept for later calls with such operands: the checks and the decision depend on the key alone. Those of int8 weights,
    and of fused kernels, which may open shared memory, are not kept here. Raises `ValueError` for operands that do not
    fit, and what `choose` raises.
    """
    if settings.stream_limit != FOLLOWED.limit:
        stream_limit.follow(settings, x.device.type)
    if settings.fused or not isinstance(w, torch.Tensor) or comm_scales is not None:
        return _decide(operator, x, w, group, settings, known, layout, comm_scales, parts)
    operands = type(x), x.shape, x.dtype, x.device, type(w), w.shape, w.dtype, w.device
    key = operator, *operands, settings, known, layout, parts
    kept = OF_GROUPS.get(group) or of_group(group)
    decision = kept.decisions.get(key)
    if decision is None:
        decision = _decide(operator, x, w, group, settings, known, layout, comm_scales, parts)
        _keep(kept, key, decision)
    return decision


def decided_module(x: torch.Tensor, w: ModuleWeight, group: dist.ProcessGroup, sizes: Sizes) -> Decision:
    """Decide how the all-reduce of x [..., K] and a module's weight [K, N] runs, in chunks of `sizes` rows.

    Its kernel is not one of those that `choose` knows. Kept as of `decided`; raises `ValueError` for operands that do
    not fit.
    """
    kept, key = of_group(group), (x.shape, x.dtype, x.device, w.shape, w.dtype, w.device, sizes)
    decision = kept.decisions.get(key)
    if decision is None:
        matmul, kernel = matmul_of(ALL_REDUCE, x, w, group), "chunked" if len(sizes) > 1 else "reference"
        decision = Decision(matmul, kernel, sizes, None, (because("module"),), given=True)
        _keep(kept, key, decision)
    return decision


def decided_exchange(
    exchange: Exchange, group: dist.ProcessGroup, settings: OperatorSettings, known: Known | None = None
) -> Decision:
    """Decide in how many groups of parts an exchange on `group` runs: the same on every rank, kept as of `decided`."""
    if settings.stream_limit != FOLLOWED.limit:
        stream_limit.follow(settings, exchange.device)
    kept, key = of_group(group), (exchange, settings, known)
    decision = kept.decisions.get(key)
    if decision is None:
        decision = choose(exchange, settings, known)
        log_once(decision)
        _keep(kept, key, decision)
    return decision


def _keep(kept: OfGroup, key: Hashable, decision: Decision) -> None:
    if len(kept.decisions) == MOST_DECIDED:
        kept.decisions.clear()
    kept.decisions[key] = decision


def start_matmul_all_reduce(
    x: Input,
    w: Weight | ModuleWeight,
    group: dist.ProcessGroup,
    decision: Decision,
    *,
    comm_scales: CommScales | None = None,
    product: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Pending:
    """Start ``all_reduce(x @ w)``: x [..., K], w [K, N], w or both in int8, or a module's; pending [M, N].

    decision
        Of `decided`, for such operands.
    comm_scales
        The ranks exchange int8: sums are rounded.
    product
        ``x @ w`` [M, N], if the caller has multiplied; the operator then reads the shape, dtype and device of x and no
        value of it. A `DeferredProduct` has operands of its own, which the kernel multiplies. Other ranks may multiply
        here, as long as they call with operands of the same shapes.
    bias
        [N], added to the sum; only where `operator_adds` says that the operator does.
    """
    with autocast_off(x):
        x_m, right = _operands(x, w, decision, product)
        options = dict(decision.options)
        if bias is not None:
            options["bias"] = bias
        if comm_scales is not None:
            options["comm_scales"] = comm_scales
        if product is not None and (addends := _addends(x, w, decision, product)):
            options["addends"] = addends
        with _NOTHING if RECORDING.recorder is None else in_timeline(decision, group):
            pending: Pending = KERNELS[decision.kernel].matmul_all_reduce(x_m, right, group, decision.sizes, **options)
    return pending


def start_matmul_reduce_scatter(
    x: Input,
    w: Weight,
    group: dist.ProcessGroup,
    decision: Decision,
    after: Pending | None = None,
    *,
    addends: Sequence[torch.Tensor] = (),
    product: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Pending:
    """Start ``reduce_scatter(x @ w + addends)``: x [..., K], w [K, N], or both in int8; pending [M / R, N].

    The `addends` [M, N] are added to this rank's product; fused kernels, which settings alone request, cannot add them.
    `bias` as in `start_matmul_all_reduce`.

    `after` is an earlier collective of the same group that must finish first, where the backend runs collectives at
    the same time. `decision` and `product` as in `start_matmul_all_reduce`.
    """
    with autocast_off(x):
        x_m, right = _operands(x, w, decision, product)
        options = dict(decision.options)
        if bias is not None:
            options["bias"] = bias
        if product is not None:
            addends = _addends(x, w, decision, product)
        if addends:
            assert isinstance(decision.call, Matmul)
            decision.call.arithmetic.refuse("layers that share a gather do not sum their gradients in a tree")
            options["addends"] = addends
        with _NOTHING if RECORDING.recorder is None else in_timeline(decision, group):
            pending: Pending = KERNELS[decision.kernel].matmul_reduce_scatter(
                x_m, right, group, decision.sizes, after, **options
            )
    return pending


def operator_adds(bias: torch.Tensor, decision: Decision, group: dist.ProcessGroup) -> bool:
    """Tell whether the operator of a decision adds a bias [N] to its sum; every rank of `group` calls this alike."""
    assert isinstance(decision.call, Matmul)
    return decision.kernel == "npu" and npu.adds_bias(decision.call, bias, group)


def run_all_gather_matmul(
    x_shard: Input,
    w: Weight,
    group: dist.ProcessGroup,
    decision: Decision,
    keep_gathered: bool = True,
    *,
    each: chunked.EachRows | None = None,
    multiplies: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``all_gather(x_shard) @ w`` [M, N] and ``all_gather(x_shard)`` [M, K]: w [K, N].

    x_shard and w may both be in int8; keep_gathered is then False. With keep_gathered=False the second result may be
    None: fused kernels then need not store it. `decision` as in `start_matmul_all_reduce`. `each` is called
    for the rows of each chunk; the chunked kernel alone does so. With multiplies=False the collectives run alone, those
    that other ranks run around their matmul, and the first result is undefined; of w only shape and dtype count.
    """
    assert not (keep_gathered and isinstance(x_shard, QuantisedRows)), "gathered int8 rows are not kept"
    with autocast_off(x_shard):
        x_m, right = _operands(x_shard, w, decision, None)
        options = dict(decision.options)
        if not multiplies and decision.kernel not in FUSED:  # a fused kernel takes no weight but a tensor
            right = NoProduct(w.shape)
        if decision.kernel == "chunked":
            options["each"] = each
        with _NOTHING if RECORDING.recorder is None else in_timeline(decision, group):
            y_m, gathered_m = KERNELS[decision.kernel].all_gather_matmul(
                x_m, right, group, decision.sizes, keep_gathered=keep_gathered, **options
            )
    return y_m, gathered_m


def gather_sizes(
    x_shard: torch.Tensor, other: int, group: dist.ProcessGroup, settings: OperatorSettings, known: Known | None = None
) -> Sizes:
    """Return the rows of each chunk of an all-gather of x_shard [..., K] whose rows a weight gradient reads.

    other: the features on the other side of that matmul. It reads all rows at once, and a backend that moves rows
    through buffers copies those of each chunk. So on a device they come in one collective.
    """
    (*leading, features), device = x_shard.shape, x_shard.device.type
    return _gather_sizes(prod(leading), features, other, device, settings.for_operators, known or NOTHING)


@functools.lru_cache(maxsize=4096)
def _gather_sizes(rows: int, features: int, other: int, device: str, settings: OperatorSettings, known: Known) -> Sizes:
    if usual_backend(device).launches or too_narrow(features, other):
        return (rows,)
    return split_rows(rows, usual_chunks(settings, known), settings.chunk_rows)


def start_gather_rows(x_shard: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Pending:
    """Start ``all_gather(x_shard)``: x_shard [..., K] as M / R rows, in chunks of `sizes` rows; pending [M, K]."""
    x_m = rows_of(x_shard)
    if len(sizes) > 1:  # whether rows are unfinished may differ between ranks, and decides nothing
        return chunked.start_gathers(x_m, group, sizes, "all_gather")
    return reference.gather_rows(x_m, group, "all_gather")


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


def in_timeline(decision: Decision, group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a context that records the call of the chosen kernel, if a recorder is active."""
    recorder = RECORDING.recorder
    if recorder is None:
        return _NOTHING
    return recorder.call(recorded(decision), decision.call.device, group, fused=decision.kernel in FUSED)


def recorded(decision: Decision) -> dict[str, object]:
    """Return the fields of a call in a timeline record."""
    call = decision.call
    shape = {"operator": call.operator, **dict(zip("mkn", call.shape, strict=True))}
    dtype = str(call.dtype).removeprefix("torch.")
    return {**shape, "dtype": dtype, "kernel": decision.kernel, "chunks": len(decision.sizes)}


@functools.lru_cache(maxsize=4096)
def log_once(decision: Decision) -> None:
    """Log each new decision on rank 0; warn, once for each reason, if it does not meet the user's request."""
    if dist.get_rank() != 0:
        return
    log.info("%s: %s, chunks: %d (%s)", decision.call.in_words, decision.kernel, len(decision.sizes), decision.reason)
    if decision.unmet:
        _warn_once(decision.unmet)


@functools.lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    log.warning("%s", reason)


def decision_for(
    matmul: Matmul,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    known: Known | None,
    device: torch.device,
    layout: str = ANY,
) -> Decision:
    """Return how a matmul runs on `group`; at the first call of a shape its ranks may communicate."""
    if settings.fused:
        matmul = with_fused_limits(matmul, group, float(settings.time_limit))
    return keep_bits(choose(matmul, settings, known), group, device, layout)


def with_fused_limits(matmul: Matmul, group: dist.ProcessGroup, time_limit: float = shm.TIME_LIMIT) -> Matmul:
    """Return `matmul` with what decides whether the fused kernel of its device runs it; every rank calls this."""
    if matmul.device == "cpu":
        return shm.ask(matmul, group, time_limit)
    return npu.ask(matmul) if matmul.device == "npu" else matmul


def _decide(
    operator: str,
    x: Input,
    w: Weight,
    group: dist.ProcessGroup,
    settings: OperatorSettings,
    known: Known | None,
    layout: str,
    comm_scales: CommScales | None,
    parts: tuple[int, ...],
) -> Decision:
    """Check the operands, and choose kernel and chunks."""
    matmul = replace(matmul_of(operator, x, w, group), parts=parts)
    if comm_scales is not None:
        matmul = replace(matmul, comm_quant=True)
        comm_scales.check(operator, matmul.n, matmul.dtype, x.device)
    stream_limit.follow(settings, matmul.device)
    decision = decision_for(matmul, group, settings, known, x.device, layout)
    log_once(decision)
    return decision


def _operands(
    x: Input, w: Weight | ModuleWeight, decision: Decision, product: torch.Tensor | None
) -> tuple[Input, Weight | ModuleWeight | MultipliedRows | NoProduct]:
    """Return the operands as the kernel takes them."""
    if product is not None:
        deferred = _deferred(x, w, decision, product)
        if deferred is None:
            columns = product.shape[-1]
            fused = decision.kernel in FUSED  # which takes no weight but a tensor: the identity changes no bit
            weight = torch.eye(columns, dtype=x.dtype, device=x.device) if fused else MultipliedRows(columns)
            return rows_of(finished(product)), weight
        deferred.check()
        x, w = deferred.x, deferred.w
    if isinstance(x, QuantisedRows):
        if decision.kernel == "npu":
            return x.rows(), w
        assert not isinstance(w, ModuleWeight)
        x, w = compute(BESIDE, "dequantise", _dequantised, x, w)
    x_m = rows_of(x)
    if decision.alignment and isinstance(w, torch.Tensor):
        return align_operands(x_m, w, decision.alignment)
    return x_m, w


def _deferred(x: Input, w: Weight | ModuleWeight, decision: Decision, product: torch.Tensor) -> DeferredProduct | None:
    """Return the product of the call if its kernel is to multiply it, in chunks, and can add to it."""
    if not isinstance(product, DeferredProduct) or product.multiplied or decision.kernel not in ADDING:
        return None
    return product if (product.x.shape, product.w.shape) == (x.shape, w.shape) else None


def _addends(x: Input, w: Weight | ModuleWeight, decision: Decision, product: torch.Tensor) -> list[torch.Tensor]:
    """Return the addend of a deferred product, as rows."""
    deferred = _deferred(x, w, decision, product)
    return [] if deferred is None else [rows_of(addend) for addend in deferred.addends]


def _dequantised(x: QuantisedRows, w: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    return x.dequantise(), dequantised_weight(w, x.dtype)
