"""Corrects the mean losses of DTensors, which torch computes over the local part instead of the whole tensor.

For mse_loss, huber_loss, smooth_l1_loss, binary_cross_entropy and soft_margin_loss on tensors sharded over R ranks,
torch (2.13, `torch/distributed/tensor/_ops`) runs backward on the local part with ``reduction="mean"``: gradients are R
times too large. With uneven shards, the mean of the local means also differs from the mean; this affects
binary_cross_entropy_with_logits too. Here DTensor gathers the tensors for a mean; sums and unreduced losses stay
sharded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten
LOSSES = (
    aten.mse_loss.default,
    aten.huber_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
BACKWARDS = (
    aten.mse_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)
NONE, MEAN = 0, 1  # at::Reduction
Sharding = tuple[list[Placement | None], list[Placement | None]]


@cache
def register_loss_shardings() -> None:
    """Register shardings of these losses with DTensor, in this process, that give the values of whole tensors."""
    for operators, backward in ((LOSSES, False), (BACKWARDS, True)):
        for operator in operators:
            register_sharding(operator)(_shardings(operator, backward))


def _shardings(operator: torch._ops.OpOverload, backward: bool) -> Any:
    """Return the function from an operator's arguments to its shardings on one mesh dimension (`register_sharding`)."""
    declared = operator._schema.arguments
    place = next(index for index, argument in enumerate(declared) if argument.name == "reduction")
    default = declared[place].default_value

    def shardings(*args: Any) -> list[Sharding]:
        reduction = args[place] if place < len(args) else default
        is_tensor = [hasattr(argument, "placements") for argument in args]
        accepted: list[Sharding] = [([Replicate()], [Replicate() if tensor else None for tensor in is_tensor])]
        tensors = [argument for argument, tensor in zip(args, is_tensor, strict=True) if tensor]
        scalar = tensors.pop(0) if backward and reduction != NONE else None
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if reduction == MEAN or len(shapes) != 1:
            return accepted
        for dim in range(len(shapes.pop())):
            sharded: list[Placement | None] = [
                None if not tensor else Replicate() if argument is scalar else Shard(dim)
                for argument, tensor in zip(args, is_tensor, strict=True)
            ]
            accepted.append(([Shard(dim) if backward or reduction == NONE else Partial()], sharded))
        return accepted

    return shardings
