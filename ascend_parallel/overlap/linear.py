"""Tensor-parallel linear layers: two autograd functions, `ColumnLinear` and `RowLinear`, over the three operators.

A call goes from `row_linear` or `run_row` through `RowLinear.forward` and `row_forward` to an operator of
ops/operators.py, which calls the chosen kernel; nothing stands in between but torch's `apply`. A `forward_wrapper`, of
recompute and regions, is called in `RowLinear.forward`. A column layer goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, check_operands
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.loop_operators import (
    run_all_gather,
    run_all_reduce,
    run_column_gradients,
    run_local_gradients,
    run_local_product,
    run_reduce_scatter,
)
from ascend_parallel.ops.module_weight import ModuleWeight
from ascend_parallel.ops.operators import (
    any_autocast,
    decided,
    decided_module,
    gather_sizes,
    gathered_shape,
    operator_adds,
    rows_of,
    run_all_gather_matmul,
    scattered_shape,
    shaped,
    start_gather_rows,
    start_matmul_all_reduce,
    start_matmul_reduce_scatter,
)
from ascend_parallel.ops.probing import ANY, ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.record import BESIDE, compute
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import finished
from ascend_parallel.overlap.choices import cast_by_autocast
from ascend_parallel.overlap.known import known_of
from ascend_parallel.overlap.layer import (
    ForwardWrapper,
    ParallelLinear,
    Products,
    checked,
    in_forward,
    layer_backward,
    local,
    run_directly,
)
from ascend_parallel.overlap.layer_shape import BACKWARD, COLUMN, FORWARD, ROW
from ascend_parallel.overlap.sequence_backward import (
    bias_gradient_of,
    column_sequence_backward,
    gradients_under,
    postponed_weight_gradient,
    row_sequence_backward,
    weight_gradient_of,
)
from ascend_parallel.overlap.weight_gradient import WeightGradient
from ascend_parallel.settings import Settings


def column_linear(
    x: torch.Tensor,
    weight_shard_n: torch.Tensor,
    bias_shard_n: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None = None,
    sequence_parallel: bool = False,
    reduce_input_grad: bool = True,
    weight_gradient: WeightGradient | None = None,
    before_communicating: Callable[[], None] | None = None,
    forward_wrapper: ForwardWrapper = run_directly,
    leaves_rows: int = 0,
    dtensors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    parts: tuple[int, ...] = (),
) -> torch.Tensor:
    """Run a column-parallel linear layer on one rank of `group`.

    x               [..., K], the same on every rank; with sequence_parallel [S / R, ..., K], this rank's rows
    weight_shard_n  [N / R, K], this rank's outputs
    bias_shard_n    [N / R] or None
    returns         [..., N / R]; with sequence_parallel [S, ..., N / R]

    With reduce_input_grad=False dx is this rank's part of the sum (sequence_parallel always reduce-scatters dx).
    known: what decides the chunks beside the settings; None: their plan alone.

    before_communicating is called before each pass's first collective. ``forward_wrapper(fn)`` runs `fn`, or
    returns its saved products during recompute. `dtensors`: those whose local tensors x and the weight are; autograd
    then notices an operator that changes them in place before backward. `parts`: the outputs of each part of a fused
    weight on this rank, such as (gate, up), which COC_DETERMINISTIC=tp has to know.

    Whether x and the weight require gradients must be the same on every rank. Raises `ValueError` for operands
    that do not fit, `CollectiveError` if a rank fails.
    """
    known = known_of(settings) if known is None else known
    layer = ParallelLinear(
        kind=COLUMN,
        group=group,
        settings=settings,
        known=known,
        arithmetic=known.arithmetic(settings),
        sequence_parallel=sequence_parallel,
        reduce_input_grad=reduce_input_grad,
        weight_gradient=weight_gradient or WeightGradient(),
        before_communicating=before_communicating,
        forward_wrapper=forward_wrapper,
        leaves_rows=leaves_rows,
        dtensors=dtensors,
        parts=parts,
    )
    return run_column(x, weight_shard_n, bias_shard_n, layer)


def run_column(
    x: torch.Tensor, weight_shard_n: Weight, bias_shard_n: torch.Tensor | None, layer: ParallelLinear
) -> torch.Tensor:
    """Run `column_linear` with the options of `layer`; a frozen int8 weight [K, N / R] needs an `input_grain`."""
    if not (layer.sequence_parallel or layer.reduce_input_grad):
        layer.refuse_partial_gradient(x)
    if any_autocast():
        x, weight_shard_n = _cast(x, weight_shard_n)
    y: torch.Tensor = ColumnLinear.apply(x, weight_shard_n, bias_shard_n, layer)  # type: ignore[no-untyped-call]
    return y


def row_linear(
    x_shard_k: torch.Tensor,
    weight_shard_k: Weight,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None = None,
    sequence_parallel: bool = False,
    weight_gradient: WeightGradient | None = None,
    before_communicating: Callable[[], None] | None = None,
    forward_wrapper: ForwardWrapper = run_directly,
    leaves_rows: int = 0,
    dtensors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    parts: tuple[int, ...] = (),
) -> torch.Tensor:
    """Run a row-parallel linear layer, without its bias, on one rank of `group`.

    x_shard_k       [..., K / R], this rank's inputs
    weight_shard_k  [N, K / R], or as in `quantised_row_linear` a frozen int8 weight [K / R, N]
    returns         [..., N], the same on every rank; with sequence_parallel [S / R, ..., N], this rank's rows

    The caller adds the bias to the result. With leaves_rows the result is an `UnfinishedTensor`, whose rows are
    waited for where they are read, if its chunks have as many rows on average. Other options and errors as in
    `column_linear`.
    """
    known = known_of(settings) if known is None else known
    layer = ParallelLinear(
        kind=ROW,
        group=group,
        settings=settings,
        known=known,
        arithmetic=known.arithmetic(settings),
        sequence_parallel=sequence_parallel,
        weight_gradient=weight_gradient or WeightGradient(),
        before_communicating=before_communicating,
        forward_wrapper=forward_wrapper,
        leaves_rows=leaves_rows,
        dtensors=dtensors,
        parts=parts,
    )
    return run_row(x_shard_k, weight_shard_k, layer)


def run_row(
    x_shard_k: torch.Tensor, weight_shard_k: Weight, layer: ParallelLinear, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Run `row_linear` with the options of `layer`, and add a bias [N]: in a fused operator, if that can add it."""
    if any_autocast():
        x_shard_k, weight_shard_k = _cast(x_shard_k, weight_shard_k)
    if bias is not None and layer.settings.fused and x_shard_k.device.type == "npu" and not layer.leaves_rows:
        fused: torch.Tensor = RowLinear.apply(x_shard_k, weight_shard_k, layer, bias)  # type: ignore[no-untyped-call]
        return fused
    y: torch.Tensor = RowLinear.apply(x_shard_k, weight_shard_k, layer)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def run_module_row(x_shard_k: torch.Tensor, weight: ModuleWeight, layer: ParallelLinear, sizes: Sizes) -> torch.Tensor:
    """Run `row_linear` with the weight [K / R, N] of a module that multiplies itself; it has no backward.

    sizes: the rows of each chunk, the same on every rank.
    """
    layer = layer.as_host_allows(x_shard_k)
    with in_forward(SimpleNamespace(), "row", x_shard_k):
        layer.about_to_communicate()
        decision = decided_module(x_shard_k, weight, layer.group, sizes)
        pending = start_matmul_all_reduce(x_shard_k, weight, layer.group, decision)
        y = layer.result(pending)
        return y if x_shard_k.dim() == 2 else shaped(y, (*x_shard_k.shape[:-1], weight.shape[1]))


def _cast(x: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, Weight]:
    return cast_by_autocast(x), cast_by_autocast(weight) if isinstance(weight, torch.Tensor) else weight


class ColumnLinear(torch.autograd.Function):
    """A linear layer whose weight w [N, K] is cut along N: each rank has w_shard_n [N / R, K].

    y_shard_n  = x @ w_shard_n.t()                       [..., N / R]  x [..., K], the same on every rank
    dx         = all_reduce(dy_shard_n @ w_shard_n)      [..., K]
    dw_shard_n = dy_shard_n.t() @ x                      [N / R, K]

    with sequence parallelism:

    y_shard_n  = all_gather(x_shard_m) @ w_shard_n.t()   [S, ..., N / R]  x_shard_m [S / R, ..., K]
    dx_shard_m = reduce_scatter(dy_shard_n @ w_shard_n)  [S / R, ..., K]
    dw_shard_n = dy_shard_n.t() @ all_gather(x_shard_m)  [N / R, K]

    Each rank's outputs depend on all inputs, so forward needs whole rows, and each rank has a part of the sum dx.
    Every matmul next to a collective overlaps with it. dw runs under the rest of the communication of dx; it is not
    cut, since chunks would change the order of its sum over rows, and its bits. Backward gathers x_shard_m again,
    unless `recompute_all_gather` is off: the gathered rows are R times as large.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, layer: ParallelLinear
    ) -> torch.Tensor:
        """Return y_shard_n with the bias added."""
        keep = not layer.settings.recompute_all_gather and ctx.needs_input_grad[1]
        with in_forward(ctx, "column", x):
            if layer.forward_wrapper is run_directly:
                y, gathered_m = column_forward(x, weight, bias, layer, keep)
            else:
                y, gathered_m = layer.forward_wrapper(lambda: column_forward(x, weight, bias, layer, keep))
        _save(ctx, layer, x, x if gathered_m is None else gathered_m, weight)
        if layer.settings.digests is not None:
            layer.write_digest("column", "output", y, -1)
        return y

    @staticmethod
    @layer_backward("column")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        layer: ParallelLinear = ctx.layer.in_backward
        if layer.leaves_rows:
            layer = layer.as_host_allows(dy)
        kept, weight, layout = _saved(ctx)
        if (begin := layer.weight_gradient.begin) is not None:
            begin(kept, weight)
        output_gradient = dy
        if dy.dtype != ctx.x_dtype:
            dy = dy.to(ctx.x_dtype)
        needs_bias, db = ctx.needs_input_grad[2], None
        bias = needs_bias and dy is output_gradient  # what the loops in C++ sum
        postponed = kept is not None and layer.weight_gradient.postpone(dy)
        placeholder = layer.weight_gradient.placeholder(kept) if postponed else None
        if postponed:
            kept = None
        if layer.sequence_parallel:
            dx, dw, db = column_sequence_backward(dy, kept, weight, layer, layout, bias=bias)
        elif layer.reduce_input_grad and weight is not None:
            if layer.before_communicating is not None:
                layer.before_communicating()
            group, known = layer.group, layer.known_for(BACKWARD, dy, weight) if layer.leaves_rows else layer.known
            decision = decided(
                ALL_REDUCE, dy, weight, group, layer.settings, known, layout=ROW_MAJOR, parts=layer.parts
            )
            direct = kept is not None and layer.multiplies_gradient
            if direct and (found := run_column_gradients(dy, weight, kept, group, decision, bias=bias)) is not None:
                dx, dw, db = found
            else:
                pending = start_matmul_all_reduce(dy, weight, group, decision)
                dx, dw = gradients_under(layer, pending, dy, kept)
        else:
            dx, dw = _local_backward(dy, kept, weight, layer)
        if dx is not None and dx.ndim == 2:  # rows; also in their shape a new tensor: a work may still hold the other,
            dx = dx.view(ctx.x_shape)  # and autograd copies a gradient that somebody holds
        if needs_bias and db is None:  # last: a sum over rows needs all of them, and dx is then on its way
            db = bias_gradient_of(layer, output_gradient)
        if layer.settings.digests is not None:
            for name, gradient, dim in (("input", dx, None), ("weight", dw, 0), ("bias", db, 0)):
                layer.write_digest("column", f"{name} gradient", gradient, dim)
        return dx, placeholder if postponed else dw, db, None


class RowLinear(torch.autograd.Function):
    """A linear layer whose weight w [N, K] is cut along K: each rank has w_shard_k [N, K / R], and x_shard_k.

    y          = all_reduce(x_shard_k @ w_shard_k.t())      [..., N], the same on every rank  x_shard_k [..., K / R]
    dx_shard_k = dy @ w_shard_k                             [..., K / R]
    dw_shard_k = dy.t() @ x_shard_k                         [N, K / R]

    with sequence parallelism:

    y_shard_m  = reduce_scatter(x_shard_k @ w_shard_k.t())  [S / R, ..., N]
    dx_shard_k = all_gather(dy_shard_m) @ w_shard_k         [S, ..., K / R]
    dw_shard_k = all_gather(dy_shard_m).t() @ x_shard_k     [N, K / R]

    Each rank's product is a part of the sum y. The bias is added to the sum, once: by `run_row`, or where fused
    operators are asked for by the operator, whose db is ``dy.sum(rows)``. Every matmul next to a collective overlaps
    with it. dw runs after the gather; only `split_weight_gradient` cuts it along the rows, which
    changes the order of its sum, and its bits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Weight, layer: ParallelLinear, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return y, or y_shard_m, with the bias added."""
        with in_forward(ctx, "row", x):
            if layer.forward_wrapper is run_directly:
                y = row_forward(x, weight, layer, bias=bias)
            else:
                y, _ = layer.forward_wrapper(lambda: (row_forward(x, weight, layer, bias=bias), None))
        _save(ctx, layer, x, x, weight)
        if layer.settings.digests is not None:
            layer.write_digest("row", "output", y, None)
        return y

    @staticmethod
    @layer_backward("row")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and weight."""
        layer: ParallelLinear = ctx.layer.in_backward
        if layer.leaves_rows:
            layer = layer.as_host_allows(dy, leaves=False)
        x, weight, layout = _saved(ctx)
        output_gradient = dy
        if dy.dtype != ctx.x_dtype:
            dy = dy.to(ctx.x_dtype)
        if layout == ANY:  # an int8 weight
            dy = rows_of(dy)
        if (begin := layer.weight_gradient.begin) is not None:
            begin(x, weight)
        if not layer.sequence_parallel:
            dx, dw = _local_backward(dy, x, weight, layer)
        elif weight is not None:
            dx, dw = row_sequence_backward(dy, x, weight, layer, layout)
        else:
            sizes = gather_sizes(dy, x.shape[-1], layer.group, layer.settings, layer.known)
            gathered = start_gather_rows(dy, layer.group, sizes).wait()
            dx, dw = None, weight_gradient_of(layer, x, gathered)
        if dx is not None and dx.ndim == 2:  # rows; also in their shape a new tensor: a work may still hold the other,
            dx = dx.view(ctx.x_shape)  # and autograd copies a gradient that somebody holds
        if layer.settings.digests is not None:
            for name, gradient, dim in (("input", dx, -1), ("weight", dw, 1)):
                layer.write_digest("row", f"{name} gradient", gradient, dim)
        needed = len(ctx.needs_input_grad) == 4 and ctx.needs_input_grad[3]
        return dx, dw, None, bias_gradient_of(layer, output_gradient) if needed else None


def column_forward(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, layer: ParallelLinear, keep: bool
) -> Products:
    """Return y with the bias added; with `keep` and sequence parallelism also the gathered rows of x."""
    if not layer.sequence_parallel and not layer.arithmetic.forms_every_product:
        found = run_local_product(x, weight, bias)
        if found is not None:
            return found, None
    gathered_m, (w, layout) = None, _right(weight)
    if layer.sequence_parallel:
        if layer.before_communicating is not None:
            layer.before_communicating()
        given, group = x if layer.input_grain is None else layer.input_of(x), layer.group
        decision = decided(ALL_GATHER, given, w, group, layer.settings, layer.known, layout=layout, parts=layer.parts)
        if (whole := run_all_gather(given, w, group, decision, keep)) is not None:
            y, gathered_m = whole
        else:
            y_m, gathered_m = run_all_gather_matmul(given, w, group, decision, keep)
            y = shaped(y_m, gathered_shape(x.shape, layer.group.size(), w.shape[1]))
    else:
        assert isinstance(w, torch.Tensor), "an int8 weight needs sequence parallelism here"
        check_operands("column_linear", x, w)
        y = layer.arithmetic.product(x, w, layer.group.size(), layer.parts)
    if bias is not None:  # in place, unless it promotes the result (an fp32 bias under autocast)
        y = y.add_(bias) if torch.result_type(y, bias) == y.dtype else y + bias
    return y, gathered_m if keep else None


def row_forward(
    x: torch.Tensor,
    weight: Weight,
    layer: ParallelLinear,
    product: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over ranks of ``x @ w``, or this rank's rows, with a bias [N] added.

    product: of any features; as of `start_matmul_all_reduce`.
    """
    if layer.before_communicating is not None:
        layer.before_communicating()
    group, settings = layer.group, layer.settings
    known = layer.known_for(FORWARD, x, weight) if layer.leaves_rows else layer.known
    if layer.leaves_rows:
        layer = layer.as_host_allows(x)
    w, layout = (weight.t(), TRANSPOSED) if isinstance(weight, torch.Tensor) else _right(weight)
    given = x if layer.input_grain is None else layer.input_of(x)
    features = w.shape[1] if product is None else product.shape[-1]
    finishes = layer.finishes or not layer.leaves_rows
    whole = product is None and finishes and layer.comm_scales is None
    if not layer.sequence_parallel:
        scales = layer.comm_scales
        decision = decided(
            ALL_REDUCE, given, w, group, settings, known, layout=layout, comm_scales=scales, parts=layer.parts
        )
        if whole and (y := run_all_reduce(given, w, group, decision)) is not None:
            return y if bias is None else y + bias
        inside = bias if bias is not None and operator_adds(bias, decision, group) else None
        pending = start_matmul_all_reduce(given, w, group, decision, comm_scales=scales, product=product, bias=inside)
        y = shaped(layer.result(pending) if layer.leaves_rows else pending.wait(), (*x.shape[:-1], features))
        return y if bias is None or bias is inside else y + bias
    if isinstance(w, QuantisedWeight) and isinstance(given, torch.Tensor):
        w = compute(BESIDE, "dequantise", w.dequantise, x.dtype)
    decision = decided(REDUCE_SCATTER, given, w, group, settings, known, layout=layout, parts=layer.parts)
    if whole and (y := run_reduce_scatter(given, w, group, decision)) is not None:
        return y if bias is None else y + bias
    inside = bias if bias is not None and operator_adds(bias, decision, group) else None
    pending = start_matmul_reduce_scatter(given, w, group, decision, product=product, bias=inside)
    y = shaped(
        layer.result(pending) if layer.leaves_rows else pending.wait(),
        scattered_shape(x.shape, group.size(), features),
    )
    return y if bias is None or bias is inside else y + bias


def _right(weight: Weight) -> tuple[Weight, str]:
    """Return the right operand [K, N] of forward, and its memory layout."""
    return (weight, ANY) if isinstance(weight, QuantisedWeight) else (weight.t(), TRANSPOSED)


def _local_backward(
    dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, layer: ParallelLinear
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return ``dx = dy @ weight`` and dw, without communication; of an unfinished dy each chunk as its rows come."""
    dx = None
    if x is not None and weight is not None and layer.multiplies_gradient:
        found = run_local_gradients(dy, weight, x)
        if found is not None:
            return found
    if weight is not None:
        dx = finished(layer.arithmetic.product(dy, weight, layer.group.size(), layer.parts))
    return dx, postponed_weight_gradient(layer, x, dy)


def _save(ctx: Any, layer: ParallelLinear, x: torch.Tensor, kept: torch.Tensor | None, weight: Weight) -> None:
    """Save the tensors of the required gradients: `kept` for dw, the weight for dx."""
    input_grad, weight_grad = ctx.needs_input_grad[:2]
    ctx.x_shape, ctx.x_dtype, ctx.saves_dtensors = x.shape, x.dtype, layer.dtensors != (None, None)
    ctx.layer = layer.kept_for_backward if ctx.saves_dtensors or layer.forward_wrapper is not run_directly else layer
    parts: tuple[torch.Tensor | None, ...] = (None,)
    if isinstance(weight, QuantisedWeight):
        ctx.group_size = weight.group_size
        parts = (weight.values, weight.scale, weight.offset) if input_grad else parts
    elif input_grad:
        parts = (checked(weight, layer.dtensors[1]),) if ctx.saves_dtensors else (weight,)
    if kept is x and ctx.saves_dtensors:
        kept = checked(x, layer.dtensors[0])
    ctx.save_for_backward(kept if weight_grad else None, *parts)


def _saved(ctx: Any) -> tuple[Any, Any, str]:
    """Return the operands that `_save` has saved: dw's, and the weight [N, K], dequantised, with its memory layout."""
    kept, weight, *scales = map(local, ctx.saved_tensors) if ctx.saves_dtensors else ctx.saved_tensors
    if not scales:
        return kept, weight, ROW_MAJOR
    scale, offset = scales
    dequantise = QuantisedWeight(weight, scale, offset, ctx.group_size).dequantise
    return kept, compute(BESIDE, "dequantise", dequantise, ctx.x_dtype).t(), ANY
