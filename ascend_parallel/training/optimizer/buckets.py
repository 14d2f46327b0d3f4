"""Tensors sent together: flat buffers of about a bucket's size, and the collectives that carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.training.optimizer.partition import Division

# As torch's DistributedDataParallel has it.
BUCKET_BYTES = 25 << 20


def in_buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Yield indices, in their order, of tensors of one dtype that together are of about `bucket_bytes`."""
    found: list[int] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        if found and (filled + tensor.nbytes > bucket_bytes or tensor.dtype != tensors[found[0]].dtype):
            yield found
            found, filled = [], 0
        found.append(index)
        filled += tensor.nbytes
    if found:
        yield found


def sum_whole(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Sum each tensor over the ranks of `group`, in place."""
    for indices in in_buckets(tensors, bucket_bytes):
        parts = [tensors[index] for index in indices]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=group)
        for part, summed in zip(parts, torch.split_with_sizes(flat, [part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


class Scatter:
    """Sums of several tensors on their way: each rank gets those of its boxes.

    An all-to-all, so that slices need not be of one size, and a sum in rank order, so that it has the same bits each
    time. It holds two buffers of the bucket's size until it is taken.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | None],
        like: Sequence[torch.Tensor],
        divisions: Sequence[Division],
        group: dist.ProcessGroup,
    ) -> None:
        """Start; a tensor that is None counts as zeros, as the gradient of the parameter in `like` has them."""
        me = group.rank()
        self._boxes = [division[me] for division in divisions]
        sizes = [sum(box.size for division in divisions if (box := division[rank])) for rank in range(group.size())]
        sent = torch.cat(
            [
                torch.zeros(box.size, dtype=grad_dtype(one), device=one.device)
                if given is None
                else box.of(given).reshape(-1)
                for rank in range(group.size())
                for given, one, division in zip(tensors, like, divisions, strict=True)
                if (box := division[rank])
            ]
        )
        self._received, self._sent = sent.new_empty(sizes[me] * group.size()), sent
        self._ranks = group.size()
        self._work = dist.all_to_all_single(
            self._received, sent, [sizes[me]] * self._ranks, sizes, group=group, async_op=True
        )

    def take(self) -> list[torch.Tensor | None]:
        """Wait, and return the sum of this rank's box of each tensor, in fp32 for types of 16 bits."""
        assert self._work is not None, "this rank is not a member of the group"
        self._work.wait()
        first, *rest = self._received.chunk(self._ranks) if self._received.numel() else [self._received]
        total = first.to(torch.float32 if first.element_size() == 2 else first.dtype, copy=True)
        for part in rest:
            total.add_(part)
        sums = iter(torch.split_with_sizes(total, [box.size for box in self._boxes if box]))
        del self._received, self._sent
        return [next(sums).view(box.shape) if box else None for box in self._boxes]


def spread(
    tensors: Sequence[torch.Tensor], divisions: Sequence[Division], group: dist.ProcessGroup, bucket_bytes: int
) -> None:
    """Give every rank the whole of each tensor, of which each rank has its box up to date.

    Tensors that are one rank's are broadcast by it; boxes of others are gathered, filled up to the largest rank's.
    """
    owners = [_only_owner(division) for division in divisions]
    for owner in range(group.size()):
        own = [tensor for tensor, found in zip(tensors, owners, strict=True) if found == owner]
        for indices in in_buckets(own, bucket_bytes):
            _broadcast([own[index] for index in indices], owner, group)
    cut = [index for index, owner in enumerate(owners) if owner is None]
    for indices in in_buckets([tensors[index] for index in cut], bucket_bytes):
        chosen = [cut[index] for index in indices]
        _gather([tensors[index] for index in chosen], [divisions[index] for index in chosen], group)


def _only_owner(division: Division) -> int | None:
    owners = [rank for rank, box in enumerate(division) if box is not None]
    return owners[0] if len(owners) == 1 else None


def _broadcast(tensors: Sequence[torch.Tensor], owner: int, group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, group=group, group_src=owner)
    if group.rank() != owner:
        for tensor, new in zip(
            tensors, torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(new.view_as(tensor))


def _gather(tensors: Sequence[torch.Tensor], divisions: Sequence[Division], group: dist.ProcessGroup) -> None:
    me, ranks = group.rank(), group.size()
    sizes = [sum(box.size for division in divisions if (box := division[rank])) for rank in range(ranks)]
    mine = tensors[0].new_zeros(max(sizes))
    boxes = zip(tensors, divisions, strict=True)
    own = [box.of(tensor).reshape(-1) for tensor, division in boxes if (box := division[me])]
    if own:
        mine[: sizes[me]] = torch.cat(own)
    gathered = mine.new_empty(ranks * len(mine))
    all_gather_single(gathered, mine, group).wait()
    for rank, flat in enumerate(gathered.chunk(ranks)):
        if rank == me:
            continue
        at = 0
        for tensor, division in zip(tensors, divisions, strict=True):
            if box := division[rank]:
                box.of(tensor).copy_(flat[at : at + box.size].view(box.shape))
                at += box.size
