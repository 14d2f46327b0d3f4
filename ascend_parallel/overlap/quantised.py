"""Row-parallel layers with a frozen int8 weight, for inference and for fine-tuning of the other layers.

Forward runs matmul_all_reduce with the int8 weight; backward dequantises the weight for dx. There is no weight
gradient. With sequence parallelism no operator multiplies a floating input by an int8 weight, so each call dequantises
the whole weight and frees the copy; the layers of int8_linear.py round the input too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parametrize

from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.quantised import QuantisedWeight, quantise_weight
from ascend_parallel.overlap.linear import row_linear
from ascend_parallel.settings import Settings

log = logging.getLogger("ascend_parallel")

# Attributes by which frameworks mark how a weight is sharded; copied to the int8 weight.
SHARDING_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")


def quantised_row_linear(
    x_shard_k: torch.Tensor,
    weight_shard_k: QuantisedWeight,
    *,
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None = None,
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
    weight_shard_k.refuse_gradients()
    return row_linear(
        x_shard_k,
        weight_shard_k,
        group=group,
        settings=settings,
        known=known,
        sequence_parallel=sequence_parallel,
        before_communicating=before_communicating,
    )


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
