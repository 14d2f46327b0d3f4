"""Redistribution from one mesh to another: each rank receives, point to point, the blocks that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist

from ascend_parallel.ops.pending import NamedWork
from ascend_parallel.process_groups.collectives import SEND
from ascend_parallel.sharding.layout import Layout, Shape, bounds
from ascend_parallel.sharding.mesh import ProcessMesh, default_group
from ascend_parallel.sharding.redistribute.collectives import note

# A tag of its own keeps these sends apart from those of the user's program.
TAG = 1 << 23

Bounds = tuple[tuple[int, int], ...]
"""[start, stop) of every tensor dimension."""


@dataclass(frozen=True)
class Transfer:
    """A block of the global tensor that global rank `sender` sends to `receiver`; a local copy if both are the same."""

    sender: int
    receiver: int
    bounds: Bounds

    @property
    def elements(self) -> int:
        """Elements of the block."""
        return prod(stop - start for start, stop in self.bounds)


@lru_cache(maxsize=1024)
def transfers(
    shape: Shape, source_mesh: ProcessMesh, source: Layout, target_mesh: ProcessMesh, target: Layout
) -> tuple[Transfer, ...]:
    """Return the transfers that bring a tensor from `source_mesh` to `target_mesh`, for all ranks.

    A pure function, so every rank gets the same result. `source` has no partial placements. A receiver that already has
    a block copies the block locally. Otherwise, of the ranks that have the block, the rank with the fewest elements to
    send so far sends it; of equal ranks, the lowest.
    """
    owners: dict[Bounds, list[int]] = {}
    for rank in sorted(source_mesh.process_ids):
        owners.setdefault(rank_bounds(shape, source_mesh, source, rank), []).append(rank)
    load = dict.fromkeys(source_mesh.process_ids, 0)
    planned = []
    for receiver in sorted(target_mesh.process_ids):
        if not _receives(target_mesh, target, receiver):
            continue
        needed = rank_bounds(shape, target_mesh, target, receiver)
        for held, ranks in owners.items():
            block = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, needed, strict=True))
            if any(start >= stop for start, stop in block):
                continue
            sender = receiver if receiver in ranks else min(ranks, key=lambda rank: (load[rank], rank))
            transfer = Transfer(sender, receiver, block)
            load[sender] += transfer.elements if sender != receiver else 0
            planned.append(transfer)
    return tuple(planned)


def redistribute_across_meshes(
    local: torch.Tensor,
    shape: Sequence[int],
    source_mesh: ProcessMesh,
    source: Layout,
    target_mesh: ProcessMesh,
    target: Layout,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Redistribute a tensor to another mesh, point to point, and return this rank's local tensor on the target mesh.

    local
        This rank's local tensor on the source mesh; on a rank outside the source mesh, any tensor of the right dtype
        and device.
    group
        A group with all ranks of both meshes; None: the default group.

    A rank outside the target mesh gets an empty tensor. Every rank of both meshes must call this function. Not
    differentiable.
    """
    whole, rank = tuple(shape), dist.get_rank()
    planned = transfers(whole, source_mesh, source, target_mesh, target)
    blocks, operations = {}, []
    for transfer in planned:
        if rank not in (transfer.sender, transfer.receiver):
            continue
        if transfer.sender == rank:
            blocks[transfer] = block_of(
                local, transfer.bounds, rank_bounds(whole, source_mesh, source, rank)
            ).contiguous()
        else:
            blocks[transfer] = local.new_empty([stop - start for start, stop in transfer.bounds])
        if transfer.sender == transfer.receiver:
            continue
        sends = transfer.sender == rank
        if sends:
            note(SEND, -1, transfer.elements * local.element_size())
        operation, peer = (dist.isend, transfer.receiver) if sends else (dist.irecv, transfer.sender)
        operations.append(dist.P2POp(operation, blocks[transfer], peer, group, tag=TAG))
    everybody = group or default_group()
    for work in dist.batch_isend_irecv(operations) if operations else ():
        NamedWork("a reshard across meshes", work, everybody, local.device).wait()
    if target_mesh.coordinate(rank) is None:
        return empty_local(local, len(whole))
    own = rank_bounds(whole, target_mesh, target, rank)
    result = local.new_zeros([stop - start for start, stop in own])
    for transfer, block in blocks.items():
        if transfer.receiver == rank:
            block_of(result, transfer.bounds, own).copy_(block)
    return result


def empty_local(like: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the local tensor of a rank outside the mesh, of shape [0] * dims (a zero for a scalar)."""
    # as many dimensions as the whole tensor: torch computes strides from the local tensor in backward
    return like.new_zeros((0,) * dims)


def rank_bounds(shape: Shape, mesh: ProcessMesh, layout: Layout, rank: int) -> Bounds:
    """Return the [start, stop) of every tensor dimension that a global rank of the mesh holds."""
    place = mesh.coordinate(rank)
    assert place is not None
    return tuple(bounds(shape, layout, mesh.shape, place))


def _receives(mesh: ProcessMesh, layout: Layout, rank: int) -> bool:
    """Tell whether the rank holds values: in a sum the first rank of the line does, the others hold zeros."""
    place = mesh.coordinate(rank)
    assert place is not None
    return not any(index for index, placement in zip(place, layout, strict=True) if placement.op == "sum")


def block_of(x: torch.Tensor, block: Bounds, within: Bounds) -> torch.Tensor:
    """Return the view of `x` that covers `block`, where `x` covers `within`."""
    for dim, ((start, stop), (first, _)) in enumerate(zip(block, within, strict=True)):
        x = x.narrow(dim, start - first, stop - start)
    return x
