"""A column layer with sequence parallelism that gathers its input for other column layers too.

y_shard_n, x = all_gather(x_shard_m) @ w_shard_n.t(), all_gather(x_shard_m)
dx_shard_m = reduce_scatter(dy_shard_n @ w_shard_n + dx), where dx is what the other layers give

The usual plan of torch's users gathers once for the projections of queries, keys and values, and sums their input
gradients before one reduce-scatter. The first of the layers overlaps both collectives with its own matmuls.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_parallel.ops.call import REDUCE_SCATTER
from ascend_parallel.ops.operators import decided, gathered_shape, rows_of, shaped, start_matmul_reduce_scatter
from ascend_parallel.ops.probing import ROW_MAJOR
from ascend_parallel.overlap.choices import cast_by_autocast
from ascend_parallel.overlap.layer import ParallelLinear, checked, in_forward, layer_backward, local
from ascend_parallel.overlap.linear import column_forward
from ascend_parallel.overlap.sequence_backward import bias_gradient_of, weight_gradient_of


def shared_column_linear(
    x_shard_m: torch.Tensor, weight_shard_n: torch.Tensor, bias_shard_n: torch.Tensor | None, layer: ParallelLinear
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output [S, ..., N / R] and the gathered input [S, ..., K]: x_shard_m [S / R, ..., K].

    Gradients of both outputs reach x_shard_m. The gathered input is kept for the weight gradient: its readers keep it
    anyway. `layer` has sequence parallelism, and settings without fused kernels.
    """
    x, weight = cast_by_autocast(x_shard_m), cast_by_autocast(weight_shard_n)
    y, gathered = _SharedColumnLinear.apply(x, weight, bias_shard_n, layer)  # type: ignore[no-untyped-call]
    return y, gathered


class _SharedColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: ParallelLinear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with in_forward(ctx, "column", x):
            y, x_m = column_forward(x, weight, bias, layer, keep=True)
            assert x_m is not None
            gathered = shaped(x_m, gathered_shape(x.shape, layer.group.size(), x.shape[-1]))
        input_grad, weight_grad = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            gathered if weight_grad else None, checked(weight, layer.dtensors[1]) if input_grad else None
        )
        ctx.layer, ctx.x_shape, ctx.x_dtype = layer.kept_for_backward, x.shape, x.dtype
        ctx.set_materialize_grads(False)  # a result that nobody reads has no gradient, rather than one of zeros
        return y, gathered

    @staticmethod
    @layer_backward("column")
    def backward(ctx: Any, dy: torch.Tensor | None, dx: torch.Tensor | None) -> tuple[Any, ...]:
        layer: ParallelLinear = ctx.layer.in_backward
        gathered, weight = map(local, ctx.saved_tensors)
        db = None if dy is None or not ctx.needs_input_grad[2] else bias_gradient_of(layer, dy)
        dy = None if dy is None else dy.to(ctx.x_dtype)
        if weight is None:
            return None, None if dy is None else weight_gradient_of(layer, gathered, dy), db, None
        layer.about_to_communicate()
        group = layer.group
        addends = [] if dx is None else [rows_of(dx.contiguous()).to(ctx.x_dtype)]
        options: dict[str, Any] = {"addends": addends}
        operand = dy
        if operand is None:
            assert dx is not None
            operand, options = addends[0].new_empty(1).expand(*dx.shape[:-1], weight.shape[0]), {"product": addends[0]}
        decision = decided(REDUCE_SCATTER, operand, weight, group, layer.settings, layer.known, layout=ROW_MAJOR)
        with start_matmul_reduce_scatter(operand, weight, group, decision, **options) as pending:
            dw = None if dy is None else weight_gradient_of(layer, gathered, dy)
            dx_shard = pending.wait()
        return dx_shard.view(ctx.x_shape), dw, db, None
