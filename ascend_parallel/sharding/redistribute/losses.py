"""Corrects the mean losses of DTensors, which torch computes over the local part instead of the whole tensor.

For mse_loss, huber_loss, smooth_l1_loss, binary_cross_entropy and soft_margin_loss on tensors sharded over R ranks,
torch (2.13, `torch/distributed/tensor/_ops`) runs backward on the local part with ``reduction="mean"``: gradients are R
times too large. With uneven shards, the mean of the local means also differs from the mean; this affects
binary_cross_entropy_with_logits too. A mean of cross_entropy and nll_loss over samples sharded over R ranks is the mean
of the ranks' means: wrong where their counts differ (`ignore_index`, `weight`), and refused for uneven shards. Here
DTensor gathers the tensors for a mean; sums and unreduced losses stay sharded.

``1 - x`` of a partial sum x, as in cosine_embedding_loss, fills an ``empty_like(x)``: each of R ranks a term of 1, in
all R. Here such a new tensor is whole on every rank, and to fill a partial sum in place is refused.
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
# Forward and backward of losses by class: [samples, classes, ...] and a class for each sample.
BY_CLASS = (
    (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
)
NONE, MEAN = 0, 1  # at::Reduction
Sharding = tuple[list[Placement | None], list[Placement | None]]


@cache
def register_loss_shardings() -> None:
    """Register shardings of these losses with DTensor, in this process, that give the values of whole tensors."""
    for operators, backward in ((LOSSES, False), (BACKWARDS, True)):
        for operator in operators:
            register_sharding(operator)(_shardings(operator, backward))
    for ahead, back in BY_CLASS:
        register_sharding(ahead)(_forward_by_class)
        register_sharding(back)(_backward_by_class)
    register_sharding(aten.empty_like.default)(_empty_like)
    register_sharding(aten.fill_.Scalar)(_fill)


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


def _forward_by_class(x: Any, target: Any, weight: Any, reduction: int = MEAN, ignored: int = -100) -> list[Sharding]:
    """Return the shardings of (loss, total weight) for x, target, weight, reduction and ignored class."""
    given = None if weight is None else Replicate()
    accepted: list[Sharding] = [([Replicate(), Replicate()], [Replicate(), Replicate(), given, None, None])]
    if reduction != MEAN and len(x.shape) > 1:
        results: list[Placement | None] = [Shard(0), Replicate()] if reduction == NONE else [Partial(), Partial()]
        accepted.append((results, [Shard(0), Shard(0), given, None, None]))
    return accepted


def _backward_by_class(
    gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> list[Sharding]:
    """Return the shardings of the gradient of x, for the arguments in this order."""
    given = None if weight is None else Replicate()
    whole: list[Placement | None] = [Replicate(), Replicate(), Replicate(), given, None, None, Replicate()]
    accepted: list[Sharding] = [([Replicate()], whole)]
    if reduction != MEAN and len(x.shape) > 1:
        above = Shard(0) if reduction == NONE else Replicate()
        accepted.append(([Shard(0)], [above, Shard(0), Shard(0), given, None, None, Replicate()]))
    return accepted


def _empty_like(x: Any, **_options: Any) -> list[Sharding]:
    """Return the shardings of a new tensor for those of x: the same, but whole for a term of a sum."""
    return [*_fill(x), ([Replicate()], [Partial()])]


def _fill(x: Any, *_value: Any) -> list[Sharding]:
    """Return the shardings in which every rank may write the same number."""
    rest: list[Placement | None] = [None] * len(_value)
    whole: list[Placement | None] = [Replicate()]
    cuts: list[list[Placement | None]] = [[Shard(dim)] for dim in range(len(x.shape))]
    return [(placement, [*placement, *rest]) for placement in (whole, *cuts)]
