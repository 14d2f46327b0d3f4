"""Targets divided among their replicas, and what moves between these: sums before a step, parameters after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.training.optimizer.buckets import spread, sum_whole
from ascend_parallel.training.optimizer.partition import Division, divide, whole
from ascend_parallel.training.optimizer.targets import Owned, Target

Share = tuple[Target, Division, Owned | None]
"""A target, the box of each of its replicas (of this rank alone, if it has none), and this rank's."""


def share(targets: Sequence[Target], level: int, by: str, master_dtype: torch.dtype | None) -> list[Share]:
    """Divide targets among the ranks of each group of replicas; at level 0 each of them updates all."""
    shares: dict[int, Share] = {}
    for group, indices in by_group(targets):
        ranks, me = (group.size(), group.rank()) if group is not None else (1, 0)
        shapes = [tuple(targets[index].parameter.shape) for index in indices]
        if level == 0 or group is None:
            divisions: list[Division] = [((None if 0 in shape else whole(shape)),) * ranks for shape in shapes]
        else:
            divisions = divide(shapes, ranks, by)
        for index, division in zip(indices, divisions, strict=True):
            target, box = targets[index], division[me]
            held_by = target.copies if level == 0 else target.copies // ranks
            shares[index] = (target, division, Owned(target, box, held_by, master_dtype) if box else None)
    return [shares[index] for index in range(len(targets))]


def by_group(targets: Sequence[Target]) -> Iterator[tuple[dist.ProcessGroup | None, list[int]]]:
    """Yield each group of replicas, in the order of its first target, with its targets' indices."""
    found: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, target in enumerate(targets):
        found.setdefault(target.group, []).append(index)
    yield from found.items()


def reduce_whole(shares: Sequence[Share], bucket_bytes: int) -> None:
    """Sum the gradients of targets over their replicas, in place; of those that no replica has one, none is made."""
    for group, indices in by_group([target for target, _, _ in shares]):
        if group is None:
            continue
        targets = [shares[index][0] for index in indices]
        (reached,) = told([[target.parameter.grad is not None for target in targets]], targets[0].parameter, group)
        chosen = [target.parameter for target, yes in zip(targets, reached, strict=True) if yes]
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
        sum_whole([parameter.grad for parameter in chosen if parameter.grad is not None], group, bucket_bytes)


def told(flags: Sequence[Sequence[bool]], on: torch.Tensor, group: dist.ProcessGroup) -> list[list[bool]]:
    """Return, flag by flag, whether any rank of `group` has it set; `on` is a tensor of the device to use."""
    sent = torch.tensor(flags, dtype=torch.uint8, device=on.device)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    return [[bool(one) for one in row] for row in sent.tolist()]


def spread_updates(shares: Sequence[Share], bucket_bytes: int) -> None:
    """Give every replica the parameters that the others have updated."""
    for group, indices in by_group([target for target, _, _ in shares]):
        if group is not None:
            tensors = [shares[index][0].parameter.detach() for index in indices]
            spread(tensors, [shares[index][1] for index in indices], group, bucket_bytes)
