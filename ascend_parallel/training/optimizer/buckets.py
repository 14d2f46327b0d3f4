"""Send tensors together: flat buffers of about a bucket's size, and the collectives that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch._utils import _unflatten_dense_tensors

from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.pending import NamedWork, run_collective
from ascend_parallel.sharding.bucketing import form_buckets
from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.training.optimizer.partition import Partition


def bucket_indices(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Return, in order, the indices of each bucket: successive tensors of one dtype, together about `bucket_bytes`."""
    runs = accumulate((one.dtype != other.dtype for one, other in pairwise(tensors)), initial=0)
    return form_buckets(zip(runs, (tensor.nbytes for tensor in tensors), strict=False), bucket_bytes, bucket_bytes)


def all_reduce_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Sum each tensor over the ranks of `group`, in place."""
    for indices in bucket_indices(tensors, bucket_bytes):
        bucket = [tensors[index] for index in indices]
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        run_collective("the sum of gradients", dist.all_reduce, flat, group=group)
        sums = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
        for tensor, summed in zip(bucket, sums, strict=True):
            tensor.copy_(summed)


class BucketReduceScatter:
    """A reduce-scatter of several tensors in flight: each rank gets the sums of its shards.

    It is an all-to-all, so slices may have different sizes. Sums run in rank order, so they have the same bits each
    time. It holds two buffers of the bucket's size until `wait`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.Tensor],
        partitions: Sequence[Partition],
        group: dist.ProcessGroup,
    ) -> None:
        """Start; a tensor that is None counts as zeros, in the gradient dtype of its entry in `parameters`."""
        my_rank = group.rank()
        self._bounds = [rank_bounds[my_rank] for rank_bounds in partitions]
        sizes = _sizes(partitions, group)
        sent = torch.cat(
            [
                torch.zeros(bounds.size, dtype=grad_dtype(parameter), device=parameter.device)
                if tensor is None
                else bounds.of(tensor).reshape(-1)
                for rank in range(group.size())
                for tensor, parameter, rank_bounds in zip(tensors, parameters, partitions, strict=True)
                if (bounds := rank_bounds[rank])
            ]
        )
        self._received, self._sent = sent.new_empty(sizes[my_rank] * group.size()), sent
        self._ranks = group.size()
        work = dist.all_to_all_single(
            self._received, sent, [sizes[my_rank]] * self._ranks, sizes, group=group, async_op=True
        )
        self._work = NamedWork("the reduce-scatter of gradients", work, group, sent.device)

    def wait(self) -> list[torch.Tensor | None]:
        """Wait, and return the sum of this rank's shard of each tensor, in fp32 for 16-bit types."""
        self._work.wait()
        first, *rest = self._received.chunk(self._ranks) if self._received.numel() else [self._received]
        total = first.to(torch.float32 if first.element_size() == 2 else first.dtype, copy=True)
        for part in rest:
            total.add_(part)
        sums = iter(torch.split_with_sizes(total, [bounds.size for bounds in self._bounds if bounds]))
        del self._received, self._sent
        return [next(sums).view(bounds.shape) if bounds else None for bounds in self._bounds]


def gather_shards(
    tensors: Sequence[torch.Tensor], partitions: Sequence[Partition], group: dist.ProcessGroup, bucket_bytes: int
) -> None:
    """Give every rank the whole of each tensor; before, each rank has only its own shard up to date.

    The owner of a whole tensor broadcasts it. Shards are all-gathered, padded to the largest rank's size.
    """
    owners = [_only_owner(rank_bounds) for rank_bounds in partitions]
    for rank in range(group.size()):
        own = [tensor for tensor, owner in zip(tensors, owners, strict=True) if owner == rank]
        if own:
            _broadcast_coalesced(group, own, bucket_bytes, rank)
    cut = [index for index, owner in enumerate(owners) if owner is None]
    for indices in bucket_indices([tensors[index] for index in cut], bucket_bytes):
        chosen = [cut[index] for index in indices]
        _gather([tensors[index] for index in chosen], [partitions[index] for index in chosen], group)


def _only_owner(rank_bounds: Partition) -> int | None:
    owners = [rank for rank, bounds in enumerate(rank_bounds) if bounds is not None]
    return owners[0] if len(owners) == 1 else None


def _gather(tensors: Sequence[torch.Tensor], partitions: Sequence[Partition], group: dist.ProcessGroup) -> None:
    my_rank, ranks = group.rank(), group.size()
    sizes = _sizes(partitions, group)
    sent = tensors[0].new_zeros(max(sizes))
    pairs = zip(tensors, partitions, strict=True)
    own = [bounds.of(tensor).reshape(-1) for tensor, rank_bounds in pairs if (bounds := rank_bounds[my_rank])]
    if own:
        sent[: sizes[my_rank]] = torch.cat(own)
    gathered = sent.new_empty(ranks * len(sent))
    NamedWork("the gather of parameters", all_gather_single(gathered, sent, group), group, sent.device).wait()
    for rank, flat in enumerate(gathered.chunk(ranks)):
        if rank == my_rank:
            continue
        start = 0
        for tensor, rank_bounds in zip(tensors, partitions, strict=True):
            if bounds := rank_bounds[rank]:
                bounds.of(tensor).copy_(flat[start : start + bounds.size].view(bounds.shape))
                start += bounds.size


def _sizes(partitions: Sequence[Partition], group: dist.ProcessGroup) -> list[int]:
    """Return the elements of each rank's shards together."""
    return [sum(bounds.size for of in partitions if (bounds := of[rank])) for rank in range(group.size())]
