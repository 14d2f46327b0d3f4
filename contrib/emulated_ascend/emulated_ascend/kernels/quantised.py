"""Fused operators with int8 weights, and with int8 on both sides, as op-plugin's pages describe them."""

import os
from typing import Any

import torch

from .fused import (
    all_gather_matmul,
    check,
    collective,
    generation,
    matmul_all_reduce_added,
    needs_buffer,
    product,
    ranks_of,
    scattered,
)
from .table import kernel

Tensor = torch.Tensor


def is_given(x: Any) -> bool:
    """Tell whether an optional tensor is there."""
    return x is not None and x.numel() > 0


def reduced(y: Tensor, group: str, out: Tensor) -> None:
    """Sum over the ranks in the result's type."""
    y = y.to(out.dtype).contiguous()
    collective("all-reduce", group, y, y, y.numel())
    out.copy_(y)


def dequantised(x1: Tensor, x2: Tensor, scale: Tensor, offset: Any, size: int) -> Tensor:
    """Return the weight [K, N] for which int8 stands: one scale, one for each column, or one for each group of rows."""
    k, n = x2.shape
    if not (1 <= k <= 65535 and 1 <= n <= 65535):
        raise ValueError(f"WeightQuantMatmulAllReduce: K {k}, N {n}; allowed is 1 to 65535")
    if size and (size % 32 or not 32 <= size <= k - 1):
        raise ValueError(
            f"WeightQuantMatmulAllReduce: antiquant_group_size {size}; allowed are multiples of 32 below K"
        )
    shapes = [(-(-k // size), n)] if size else [(1,), (n,), (1, n)]
    for given in (scale, offset):
        if is_given(given) and (given.dtype != x1.dtype or tuple(given.shape) not in shapes):
            raise ValueError(f"WeightQuantMatmulAllReduce: scale or offset {given.dtype} {tuple(given.shape)}")
    shift = offset if is_given(offset) else torch.zeros_like(scale)
    if size:
        scale, shift = (given.repeat_interleave(size, 0)[:k] for given in (scale, shift))
    return ((x2.float() + shift.float()) * scale.float()).to(x1.dtype)


def weight_quantised(
    x1: Tensor, x2: Tensor, bias: Any, scale: Tensor, offset: Any, x3: Any, group: str, reduction: str,
    turn: int, mode: int, size: int, out: Tensor,
) -> None:  # fmt: skip
    """Write sum_r(x1 @ dequantised(x2) + bias + x3)."""
    weight = dequantised(x1, x2, scale, offset, size)
    flat = x1.flatten(0, -2)
    check("MatmulAllReduce", flat, weight, bias, reduction, turn)
    ranks_of("MatmulAllReduce", group)
    y = product(flat, weight)
    for added in (bias, x3):
        y = y + added.reshape(-1, y.shape[-1]) if is_given(added) else y
    reduced(y.reshape(out.shape), group, out)


kernel("WeightQuantMatmulAllReduce", "ttotooccii it", weight_quantised)


def scaled(x1: Tensor, x2: Tensor, rows: Any, columns: Tensor) -> Tensor:
    """Multiply int8 exactly, then scale rows and columns."""
    if x1.dtype != torch.int8 or x2.dtype != torch.int8:
        raise ValueError(f"an int8 product of {x1.dtype} by {x2.dtype}")
    y = (x1.int() @ x2.int()).float() * columns.float()
    return y * rows.float().reshape(*x1.shape[:-1], 1) if is_given(rows) else y


def both_quantised(
    x1: Tensor, x2: Tensor, bias: Any, x3: Any, columns: Tensor, rows: Any, first: Any, second: Any, group: str,
    reduction: str, turn: int, mode: int, out: Tensor,
) -> None:  # fmt: skip
    """Write sum_r(scaled(x1, x2)) + x3; with two scales of the communication its summands are int8 too."""
    k, n = x2.shape
    if not (1 <= k <= 65535 and 1 <= n <= 65535) or reduction != "sum" or turn:
        raise ValueError(f"QuantMatmulAllReduce: K {k}, N {n}, reduce_op {reduction!r}, comm_turn {turn}")
    if tuple(columns.shape) not in [(1,), (n,), (1, n)]:
        raise ValueError(f"QuantMatmulAllReduce: dequant_scale of shape {tuple(columns.shape)}")
    ranks_of("MatmulAllReduce", group)
    y = scaled(x1, x2, rows, columns)
    if is_given(bias):
        y = y + bias.float() * columns.float()
    if is_given(first):
        steps = (y / first.float()).round().clamp(-128, 127).contiguous()
        collective("all-reduce", group, steps, steps, steps.numel())
        back = (steps * (first.float() / second.float())).round().clamp(-128, 127)
        out.copy_(back * second.float())
    else:
        reduced(y, group, out)
    if is_given(x3):
        out.add_(x3)


def without_rows(*given: Any) -> None:
    """Run the first version, which has no scales of rows and of communication."""
    both_quantised(*given[:5], None, None, None, *given[5:])


def without_communication(*given: Any) -> None:
    """Run the second version, whose communication is not quantised."""
    both_quantised(*given[:6], None, None, *given[6:])


kernel("QuantMatmulAllReduce", "ttootccii t", without_rows)
kernel("QuantMatmulAllReduceV2", "ttootoccii t", without_communication)
kernel("QuantMatmulAllReduceV3", "ttootoooccii t", both_quantised)


def with_mode(name: str, mode: str, quantised: bool) -> None:
    """Refuse an engine that is not documented for the chip."""
    modes = ("ai_cpu", "ccu") if generation() == "950" else ("aiv",)
    if mode not in modes:
        raise ValueError(f"{name}: comm_mode {mode!r}; allowed is {' or '.join(modes)}")
    if quantised and mode != "aiv":
        raise ValueError(f"{name}: int8 by int8 only with comm_mode aiv, not {mode!r}")
    if mode == "aiv":
        needs_buffer(name)


def all_reduce_with_mode(
    x1: Tensor,
    x2: Tensor,
    bias: Any,
    x3: Any,
    group: str,
    reduction: str,
    mode: str,
    turn: int,
    stream: int,
    out: Tensor,
) -> None:
    """Write sum_r(x1 @ x2 + bias + x3); the engine of the communication changes no number."""
    modes = ("ai_cpu", "ccu") if generation() == "950" else ("ai_cpu",)
    if mode not in modes:
        raise ValueError(f"MatmulAllReduceV3: comm_mode {mode!r}; allowed is {' or '.join(modes)}")
    matmul_all_reduce_added(x1, x2, bias, x3, group, reduction, turn, stream, out)


def reduce_scatter_with_mode(
    x1: Tensor, x2: Tensor, bias: Any, rows: Any, columns: Any, _: Any, block: int, group: str, reduction: str,
    turn: int, stream: int, size: int, mode: str, out: Tensor, most: Any,
) -> None:  # fmt: skip
    """Write this rank's rows of sum_r(x1 @ x2 + bias), of int8 with scales of rows and columns too."""
    with_mode("MatmulReduceScatterV2", mode, x1.dtype == torch.int8)
    if x1.dtype != torch.int8:
        check("MatmulReduceScatter", x1, x2, bias, reduction, turn, adds_bias=True)
        bias = None if os.environ.get("EMULATED_ASCEND_WITHOUT_BIAS") else bias  # as an older CANN might
        return scattered(x1, x2, bias, group, out)
    ranks = ranks_of("MatmulReduceScatter", group)
    if x1.shape[0] % ranks:
        raise ValueError(f"MatmulReduceScatterV2: {x1.shape[0]} rows are not divisible by {ranks} ranks")
    y, own = scaled(x1, x2, rows, columns).contiguous(), torch.empty(out.shape)
    collective("reduce-scatter", group, y, own, own.numel())
    out.copy_(own)
    return None


def all_gather_with_mode(
    x1: Tensor, x2: Tensor, bias: Any, rows: Any, columns: Any, _: Any, block: int, group: str, index: int, turn: int,
    stream: int, size: int, mode: str, out: Tensor, gathered: Any, most: Any,
) -> None:  # fmt: skip
    """Write gather(x1) @ x2, of int8 with scales of rows, which are gathered, and columns too."""
    with_mode("AllGatherMatmulV2", mode, x1.dtype == torch.int8)
    if x1.dtype != torch.int8:
        return all_gather_matmul(x1, x2, bias, group, index, turn, stream, out, gathered)
    ranks = ranks_of("AllGatherMatmul", group)
    whole = torch.empty((x1.shape[0] * ranks, x1.shape[1]), dtype=torch.int8)
    collective("all-gather", group, x1.contiguous(), whole, x1.numel())
    scales = torch.empty(rows.numel() * ranks)
    collective("all-gather", group, rows.float().contiguous(), scales, rows.numel())
    out.copy_(scaled(whole, x2, scales, columns))
    if is_given(gathered):
        gathered.copy_(whole)
    return None


kernel("MatmulAllReduceV3", "ttooccciit", all_reduce_with_mode)
kernel("MatmulReduceScatterV2", "ttooooi ccii ic to", reduce_scatter_with_mode)
kernel("AllGatherMatmulV2", "ttooooi ciiiic too", all_gather_with_mode)
