"""Layers that multiply int8 by int8 (W8A8), with a frozen weight.

q rounds an input to int8 (ops/quantised_rows.py). w is a QuantisedWeight [K, N]: w_shard_n [K, N / R], w_shard_k
[K / R, N].

column  y_shard_n = all_gather(q(x_shard_m)) @ w_shard_n      dx_shard_m = reduce_scatter(dy_shard_n @ w_shard_n.t())
row     y_shard_m = reduce_scatter(q(x_shard_k) @ w_shard_k)  dx_shard_k = all_gather(dy_shard_m) @ w_shard_k.t()
        y = all_reduce(q(x_shard_k) @ w_shard_k)              dx_shard_k = dy @ w_shard_k.t()

The second row layer is that without sequence parallelism; its ranks may exchange int8 (ops/comm_scales.py).
Only Ascend's fused operators multiply int8. Where they do not run, forward dequantises q(x) and w and runs the plain
operators. Backward dequantises w, and takes the rounding of x and of the sums for the identity. There is no weight
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.operators import (
    gathered_shape,
    rows_of,
    run_all_gather_matmul,
    scattered_shape,
    shaped,
    start_matmul_all_reduce,
    start_matmul_reduce_scatter,
)
from ascend_parallel.ops.quantised import QuantisedWeight
from ascend_parallel.ops.quantised_rows import quantise_rows
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.overlap.choices import backward_settings, cast_by_autocast, column_backward_settings
from ascend_parallel.overlap.layer import in_forward, layer_backward
from ascend_parallel.settings import Settings


def int8_column_linear(
    x_shard_m: torch.Tensor,
    weight_shard_n: QuantisedWeight,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    grain: str = "token",
) -> torch.Tensor:
    """Run a column-parallel linear layer of int8 by int8, without its bias, with sequence parallelism.

    x_shard_m       [S / R, ..., K], this rank's rows, floating; rounded to int8 here
    weight_shard_n  [K, N / R], scales per tensor or channel, no offset; the transpose of column_linear's weight
    grain           "token": a scale for each row of x; "tensor": one for this rank's x
    returns         [S, ..., N / R], of the dtype of x

    Raises `ValueError` for operands or a grain that do not fit, `CollectiveError` if a rank fails.
    """
    weight_shard_n.refuse_gradients()
    y: torch.Tensor = _Int8Column.apply(  # type: ignore[no-untyped-call]
        cast_by_autocast(x_shard_m), weight_shard_n, group, settings, grain
    )
    return y


def int8_row_linear(
    x_shard_k: torch.Tensor,
    weight_shard_k: QuantisedWeight,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    grain: str = "token",
    sequence_parallel: bool = True,
    comm_scales: CommScales | None = None,
) -> torch.Tensor:
    """Run a row-parallel linear layer of int8 by int8, without its bias.

    x_shard_k       [S, ..., K / R], this rank's inputs, floating; rounded to int8 here
    weight_shard_k  [K / R, N], scales per tensor or channel, no offset; the transpose of row_linear's weight
    comm_scales     the ranks exchange int8, and the sums are rounded; only without sequence parallelism
    returns         [S / R, ..., N], this rank's rows, of the dtype of x; without sequence parallelism [S, ..., N], the
                    same on every rank

    Other options and errors as in `int8_column_linear`.
    """
    if sequence_parallel and comm_scales is not None:
        raise ValueError("comm_scales is allowed only with sequence_parallel=False: a reduce-scatter takes no scales")
    weight_shard_k.refuse_gradients()
    y: torch.Tensor = _Int8Row.apply(  # type: ignore[no-untyped-call]
        cast_by_autocast(x_shard_k), weight_shard_k, group, settings, grain, sequence_parallel, comm_scales
    )
    return y


class _Int8Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: QuantisedWeight, group: dist.ProcessGroup, settings: Settings, grain: str
    ) -> torch.Tensor:
        _save(ctx, x, weight, group, settings)
        with in_forward(ctx, "column", x):
            rows = compute(BESIDE, "quantise", quantise_rows, x, grain)
            y_m, _ = run_all_gather_matmul(rows, weight, group, settings, keep_gathered=False)
            return shaped(y_m, gathered_shape(x.shape, group.size(), weight.shape[1]))

    @staticmethod
    @layer_backward("column")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        settings = column_backward_settings(ctx.settings)
        dx_m = start_matmul_reduce_scatter(dy.to(ctx.x_dtype), _transposed(ctx), ctx.group, settings).wait()
        return dx_m.view(ctx.x_shape), None, None, None, None


class _Int8Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: QuantisedWeight,
        group: dist.ProcessGroup,
        settings: Settings,
        grain: str,
        sequence_parallel: bool,
        comm_scales: CommScales | None,
    ) -> torch.Tensor:
        _save(ctx, x, weight, group, settings)
        ctx.sequence_parallel = sequence_parallel
        with in_forward(ctx, "row", x):
            rows = compute(BESIDE, "quantise", quantise_rows, x, grain)
            if not sequence_parallel:
                y_m = start_matmul_all_reduce(rows, weight, group, settings, comm_scales=comm_scales).wait()
                return shaped(y_m, (*x.shape[:-1], weight.shape[1]))
            y_m = start_matmul_reduce_scatter(rows, weight, group, settings).wait()
            return shaped(y_m, scattered_shape(x.shape, group.size(), weight.shape[1]))

    @staticmethod
    @layer_backward("row")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        dy, w_t, settings = dy.to(ctx.x_dtype), _transposed(ctx), backward_settings(ctx.settings)
        if ctx.sequence_parallel:
            dx_m, _ = run_all_gather_matmul(dy, w_t, ctx.group, settings, keep_gathered=False)
        else:
            dx_m = compute(MATMUL, "matmul", torch.mm, rows_of(dy), w_t)
        return dx_m.view(ctx.x_shape), None, None, None, None, None, None


def _save(ctx: Any, x: torch.Tensor, weight: QuantisedWeight, group: dist.ProcessGroup, settings: Settings) -> None:
    """Save the int8 weight for dx."""
    ctx.save_for_backward(weight.values, weight.scale)
    ctx.group, ctx.settings, ctx.x_shape, ctx.x_dtype = group, settings, x.shape, x.dtype


def _transposed(ctx: Any) -> torch.Tensor:
    """Return the saved weight [K, N], dequantised, as [N, K]."""
    values, scale = ctx.saved_tensors
    w: torch.Tensor = compute(BESIDE, "dequantise", QuantisedWeight(values, scale).dequantise, ctx.x_dtype)
    return w.t()
