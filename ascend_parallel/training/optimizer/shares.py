"""Partition targets among their replicas; reduce gradients and take their norm before a step, gather updates after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.mesh import default_device
from ascend_parallel.training.optimizer.buckets import all_reduce_tensors, gather_shards
from ascend_parallel.training.optimizer.partition import Partition, full_bounds, partition
from ascend_parallel.training.optimizer.targets import OwnedParameter, OwnedShard


@dataclass(frozen=True)
class PartitionedParameter:
    """A target, the bounds of each replica's shard (of this rank's alone without replicas), and this rank's shard."""

    target: OwnedParameter
    partition: Partition
    owned: OwnedShard | None


def partitioned(
    targets: Sequence[OwnedParameter], zero_stage: int, partition_by: str, master_dtype: torch.dtype | None
) -> list[PartitionedParameter]:
    """Partition targets among the ranks of each group of replicas; at ZeRO stage 0 every replica updates all."""
    shares: dict[int, PartitionedParameter] = {}
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
            shares[index] = PartitionedParameter(target, rank_bounds, owned)
    return [shares[index] for index in range(len(targets))]


def by_group(targets: Sequence[OwnedParameter]) -> Iterator[tuple[dist.ProcessGroup | None, list[int]]]:
    """Yield each group of replicas with its targets' indices, in the order of each group's first target."""
    indices_by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, target in enumerate(targets):
        indices_by_group.setdefault(target.group, []).append(index)
    yield from indices_by_group.items()


def all_reduce_gradients(shares: Sequence[PartitionedParameter], bucket_bytes: int) -> None:
    """Sum the targets' gradients over their replicas, in place.

    A missing gradient counts as zeros if any replica has the gradient, and stays missing otherwise.
    """
    for group, indices in by_group([share.target for share in shares]):
        if group is None:
            continue
        targets = [shares[index].target for index in indices]
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
    run_collective("the comparison of gradients", dist.all_reduce, counts, group=group, op=dist.ReduceOp.MAX)
    return [[bool(flag) for flag in row] for row in counts.tolist()]


def gather_updates(shares: Sequence[PartitionedParameter], bucket_bytes: int) -> None:
    """Give every replica the parameters that the other replicas have updated."""
    for group, indices in by_group([share.target for share in shares]):
        if group is not None:
            tensors = [shares[index].target.parameter.detach() for index in indices]
            gather_shards(tensors, [shares[index].partition for index in indices], group, bucket_bytes)


def global_norm(
    gradients: Iterable[tuple[torch.Tensor, int]], norm_type: float, group: dist.ProcessGroup | None
) -> float:
    """Return the norm of the gradients of all ranks of `group` (None: of this rank's), the same bits on every rank.

    gradients
        This rank's gradients, each with the number of ranks of `group` that hold the same gradient.

    Sums run in fp64, over gradients in the given order and over ranks in rank order. The norm is inf or nan if any
    gradient contains it.
    """
    pairs = list(gradients)
    device = pairs[0][0].device if pairs else "cpu" if group is None else default_device(group)
    mine = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, copies in pairs:
        if norm_type == inf:
            mine = torch.maximum(mine, torch.linalg.vector_norm(gradient, inf).double())
        else:
            wide = torch.complex128 if gradient.is_complex() else torch.float64
            mine += torch.linalg.vector_norm(gradient, norm_type, dtype=wide) ** norm_type / copies
    parts = [mine]
    if group is not None:
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        run_collective("the norm of gradients", dist.all_gather, parts, mine, group=group)
    values = [float(part) for part in parts]
    if any(value != value for value in values):
        return float("nan")
    return max(values) if norm_type == inf else float(sum(values) ** (1 / norm_type))
