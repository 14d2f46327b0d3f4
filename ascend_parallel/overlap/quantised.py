"""Row-parallel layers with a frozen int8 weight, for inference and for fine-tuning of the other layers.

Forward runs matmul_all_reduce with the int8 weight; backward dequantises the weight for dx. There is no weight
gradient. With sequence parallelism no operator takes an int8 weight, so each call dequantises the whole weight and
frees the copy.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from ascend_parallel.ops.operators import (
    rows_of,
    run_all_gather_matmul,
    scattered_shape,
    shaped,
    start_matmul_all_reduce,
    start_matmul_reduce_scatter,
    without_autocast,
)
from ascend_parallel.ops.quantised import QuantisedWeight, quantise_weight
from ascend_parallel.ops.record import BESIDE, MATMUL, compute, recorded_layer
from ascend_parallel.overlap.choices import backward_settings
from ascend_parallel.overlap.linear import cast_by_autocast
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.settings import Settings

log = logging.getLogger("ascend_parallel")

# Attributes by which frameworks mark how a weight is sharded; copied to the int8 weight.
SHARDING_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")


@dataclass(frozen=True, kw_only=True)
class _Options:
    group: dist.ProcessGroup
    settings: Settings
    sequence_parallel: bool
    group_size: int
    before_communicating: Callable[[], None] | None


def quantised_row_linear(
    x_shard_k: torch.Tensor,
    weight_shard_k: QuantisedWeight,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    sequence_parallel: bool = False,
    before_communicating: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Run a row-parallel linear layer with a frozen int8 weight, without its bias, on one rank of `group`.

    x_shard_k       [..., K / R], this rank's inputs
    weight_shard_k  [K / R, N], the transpose of row_linear's weight
    returns         [..., N], the same on every rank; with sequence_parallel [S / R, ..., N], this rank's rows

    Options and errors as in `row_linear`.
    """
    if sequence_parallel:
        _log_dequantised(dist.get_rank())
    options = _Options(
        group=group,
        settings=settings,
        sequence_parallel=sequence_parallel,
        group_size=weight_shard_k.group_size,
        before_communicating=before_communicating,
    )
    w = weight_shard_k
    w.refuse_gradients()
    y: torch.Tensor = _QuantisedRowLinear.apply(  # type: ignore[no-untyped-call]
        cast_by_autocast(x_shard_k), w.values, w.scale, w.offset, options
    )
    return y


class _QuantisedRowLinear(torch.autograd.Function):
    @staticmethod
    @hide_from_selective_checkpoint()
    @without_autocast
    @recorded_layer("row", "forward")
    def forward(
        ctx: Any,
        x: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor | None,
        options: _Options,
    ) -> torch.Tensor:
        w, group, settings = QuantisedWeight(values, scale, offset, options.group_size), options.group, options.settings
        if options.before_communicating is not None:
            options.before_communicating()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(values, scale, offset)
            ctx.options, ctx.x_shape, ctx.x_dtype = options, x.shape, x.dtype
        if options.sequence_parallel:
            w_plain = compute(BESIDE, "dequantise", w.dequantise, x.dtype)
            y_m = start_matmul_reduce_scatter(x, w_plain, group, settings).wait()
            return shaped(y_m, scattered_shape(x.shape, group.size(), w.shape[1]))
        y_m = start_matmul_all_reduce(x, w, group, settings).wait()
        return shaped(y_m, (*x.shape[:-1], w.shape[1]))

    @staticmethod
    @once_differentiable
    @without_autocast
    @recorded_layer("row", "backward")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        options: _Options = ctx.options
        dy = dy.to(ctx.x_dtype)
        values, scale, offset = ctx.saved_tensors
        w = QuantisedWeight(values, scale, offset, options.group_size)
        w_t = compute(BESIDE, "dequantise", w.dequantise, ctx.x_dtype).t()
        if options.sequence_parallel:
            dx, _ = run_all_gather_matmul(dy, w_t, options.group, backward_settings(options.settings), False)
        else:
            dx = compute(MATMUL, "matmul", torch.matmul, rows_of(dy), w_t)
        return dx.view(ctx.x_shape), None, None, None, None


class Int8(torch.nn.Module):
    """The parametrisation of an int8 weight [N, K / R]: holds the scales, and dequantises on read.

    The scales have the layout of the transpose [K / R, N], which the operators take. They move with the module
    but keep their dtype, because the values were rounded for exactly these scales.
    """

    scale: torch.Tensor
    offset: torch.Tensor | None
    like: torch.Tensor

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        """Hold the scales of `weight`; `forward` returns the plain weight in `dtype`."""
        super().__init__()
        self.group_size = weight.group_size
        self.register_buffer("scale", weight.scale)
        self.register_buffer("offset", weight.offset)
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the plain weight [N, K / R], dequantised."""
        return self.weight(values).dequantise(self.like.dtype).t()

    def weight(self, values: torch.Tensor) -> QuantisedWeight:
        """Return the int8 weight [K / R, N] of values [N, K / R] and these scales."""
        return QuantisedWeight(values.t(), self.scale, self.offset, self.group_size)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Int8:
        kept = {name: buffer for name, buffer in self.named_buffers() if name != "like"}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self.get_buffer(name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self


def quantise_row_parallel(
    layer: torch.nn.Module, grain: str, *, group_size: int = 0, symmetric: bool = True, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Quantise the weight [N, K / R] of a row-parallel layer, such as Megatron-core's, to int8; return the layer.

    ``layer.weight`` becomes a frozen parametrisation (torch.nn.utils.parametrize). The int8 values are
    ``layer.parametrizations.weight.original``, the scales are buffers beside them; state_dict holds both. The
    patched forward runs with the int8 values. Every other read of ``layer.weight`` dequantises the weight again, so
    the layer computes the same without the patch.

    `grain`, `group_size`, `symmetric` and `dtype` (of the scales) as in `quantise_weight`; groups start at the
    beginning of this rank's K / R. Call this alike on every rank. Raises `ValueError` for options that are not
    allowed, and for a layer without such a weight.
    """
    weight = getattr(layer, "weight", None)
    if parametrize.is_parametrized(layer, "weight") or not isinstance(weight, torch.nn.Parameter):
        raise ValueError(f"{type(layer).__name__} has no parameter `weight` to quantise, or it is parametrised already")
    quantised = quantise_weight(weight.t(), grain, group_size=group_size, symmetric=symmetric, dtype=dtype)
    frozen = torch.nn.Parameter(quantised.values.t().contiguous(), requires_grad=False)
    for name in SHARDING_ATTRIBUTES:
        if hasattr(weight, name):
            setattr(frozen, name, getattr(weight, name))
    layer.register_parameter("weight", frozen)
    # unsafe skips a check that would dequantise the weight and refuse the intended change of dtype.
    parametrize.register_parametrization(layer, "weight", Int8(quantised, weight.dtype), unsafe=True)
    if hasattr(layer, "sharded_state_dict"):
        vars(layer)["sharded_state_dict"] = _refuse_sharded_state_dict
    return layer


def int8_weight(layer: torch.nn.Module) -> QuantisedWeight | None:
    """Return the int8 weight [K / R, N] of a layer that `quantise_row_parallel` changed; None for other layers."""
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    chain: Any = layer.parametrizations["weight"]  # type: ignore[index]
    return chain[0].weight(chain.original) if len(chain) == 1 and isinstance(chain[0], Int8) else None


def _refuse_sharded_state_dict(*args: object, **kwargs: object) -> object:
    """Replace Megatron's method, which would save a single rank's scales for all ranks."""
    raise RuntimeError(
        "a layer with an int8 weight has no sharded_state_dict (its scales differ from rank to rank): "
        "save state_dict() of each rank, or save the checkpoint before quantise_row_parallel"
    )


@functools.lru_cache(maxsize=2)
def _log_dequantised(rank: int) -> None:
    if rank == 0:
        log.info("an int8 weight with sequence parallelism is dequantised for each call: no operator takes it there")
