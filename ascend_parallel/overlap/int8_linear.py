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

import torch
import torch.distributed as dist

from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.quantised import QuantisedWeight
from ascend_parallel.overlap.known import known_of
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.overlap.layer_shape import COLUMN, ROW
from ascend_parallel.overlap.linear import run_column, run_row
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
    layer = ParallelLinear(
        kind=COLUMN,
        group=group,
        settings=settings,
        known=known_of(settings),
        arithmetic=settings.arithmetic,
        sequence_parallel=True,
        input_grain=grain,
    )
    return run_column(x_shard_m, weight_shard_n, None, layer)


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
    layer = ParallelLinear(
        kind=ROW,
        group=group,
        settings=settings,
        known=known_of(settings),
        arithmetic=settings.arithmetic,
        sequence_parallel=sequence_parallel,
        input_grain=grain,
        comm_scales=comm_scales,
    )
    return run_row(x_shard_k, weight_shard_k, layer)
