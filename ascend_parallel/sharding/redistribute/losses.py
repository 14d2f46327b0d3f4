"""Losses of DTensors whose mean torch takes over a rank's part instead of the whole.

For mse_loss, huber_loss, smooth_l1_loss, binary_cross_entropy and soft_margin_loss on tensors cut over R ranks torch
(2.13, `torch/distributed/tensor/_ops`) runs backward on the local part with ``reduction="mean"``: gradients are R times
too large. And where the cut is uneven, the mean of the parts' means is not the mean, for these and for
binary_cross_entropy_with_logits. Here their means are of whole tensors, which DTensor gathers; sums and losses element
by element stay cut.
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
def mend_losses() -> None:
    """Have DTensor run these losses, in this process, so that values and gradients are those of whole tensors."""
    for operators, backward in ((LOSSES, False), (BACKWARDS, True)):
        for operator in operators:
            register_sharding(operator)(_shardings(operator, backward))


def _shardings(operator: torch._ops.OpOverload, backward: bool) -> Any:
    """Return which placements, on one mesh dimension, the operator takes: see `register_sharding`."""
    declared = operator._schema.arguments
    place = next(index for index, one in enumerate(declared) if one.name == "reduction")
    default = declared[place].default_value

    def shardings(*args: Any) -> list[Sharding]:
        reduction = args[place] if place < len(args) else default
        tensors = [hasattr(one, "placements") for one in args]
        found: list[Sharding] = [([Replicate()], [Replicate() if there else None for there in tensors])]
        elements = [one for one, there in zip(args, tensors, strict=True) if there]
        scalar = elements.pop(0) if backward and reduction != NONE else None
        shapes = {tuple(one.shape) for one in elements}
        if reduction == MEAN or len(shapes) != 1:
            return found
        for dim in range(len(shapes.pop())):
            cut: list[Placement | None] = [
                None if not there else Replicate() if one is scalar else Shard(dim)
                for one, there in zip(args, tensors, strict=True)
            ]
            found.append(([Shard(dim) if backward or reduction == NONE else Partial()], cut))
        return found

    return shardings
