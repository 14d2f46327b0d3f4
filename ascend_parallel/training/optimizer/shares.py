"""Partition targets among their replicas; reduce gradients before a step, gather updated parameters after the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.training.optimizer.buckets import all_reduce_tensors, gather_shards
from ascend_parallel.training.optimizer.partition import Partition, full_bounds, partition
from ascend_parallel.training.optimizer.targets import OwnedShard, Target

Share = tuple[Target, Partition, OwnedShard | None]
"""A target, the bounds of each replica's shard (of this rank's alone without replicas), and this rank's shard."""


def share(
    targets: Sequence[Target], zero_stage: int, partition_by: str, master_dtype: torch.dtype | None
) -> list[Share]:
    """Partition targets among the ranks of each group of replicas; at ZeRO stage 0 every replica updates all."""
    shares: dict[int, Share] = {}
    for group, indices in by_group(targets):
        ranks, my_rank = (group.size(), group.rank()) if group is not None else (1, 0)
        shapes = [tuple(targets[index].parameter.shape) for index in indices]
        if zero_stage == 0 or group is None:
            partitions: list[Partition] = [((None if 0 in shape else full_bounds(shape)),) * ranks for shape in shapes]
        else:
            partitions = partition(shapes, ranks, partition_by)
        for index, rank_bounds in zip(indices, partitions, strict=True):
            target, bounds = targets[index], rank_bounds[my_rank]
            num_owners = target.copies if zero_stage == 0 else target.copies // ranks
            owned = OwnedShard(target, bounds, num_owners, master_dtype) if bounds else None
            shares[index] = (target, rank_bounds, owned)
    return [shares[index] for index in range(len(targets))]


def by_group(targets: Sequence[Target]) -> Iterator[tuple[dist.ProcessGroup | None, list[int]]]:
    """Yield each group of replicas with its targets' indices, in the order of each group's first target."""
    indices_by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, target in enumerate(targets):
        indices_by_group.setdefault(target.group, []).append(index)
    yield from indices_by_group.items()


def all_reduce_gradients(shares: Sequence[Share], bucket_bytes: int) -> None:
    """Sum the targets' gradients over their replicas, in place.

    A missing gradient counts as zeros if any replica has the gradient, and stays missing otherwise.
    """
    for group, indices in by_group([target for target, _, _ in shares]):
        if group is None:
            continue
        targets = [shares[index][0] for index in indices]
        has_grad = [target.parameter.grad is not None for target in targets]
        (reached,) = any_rank_set([has_grad], targets[0].parameter, group)
        parameters = [target.parameter for target, is_reached in zip(targets, reached, strict=True) if is_reached]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype(parameter))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        all_reduce_tensors(gradients, group, bucket_bytes)


def any_rank_set(
    flags: Sequence[Sequence[bool]], device_of: torch.Tensor, group: dist.ProcessGroup
) -> list[list[bool]]:
    """Return, for each flag, whether any rank of `group` has set the flag. Runs on the device of `device_of`."""
    counts = torch.tensor(flags, dtype=torch.uint8, device=device_of.device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    return [[bool(flag) for flag in row] for row in counts.tolist()]


def gather_updates(shares: Sequence[Share], bucket_bytes: int) -> None:
    """Give every replica the parameters that the other replicas have updated."""
    for group, indices in by_group([target for target, _, _ in shares]):
        if group is not None:
            tensors = [shares[index][0].parameter.detach() for index in indices]
            gather_shards(tensors, [shares[index][1] for index in indices], group, bucket_bytes)
