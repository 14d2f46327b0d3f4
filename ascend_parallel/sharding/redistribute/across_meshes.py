"""A tensor from one mesh to another: each rank receives, point to point, the blocks it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist

from ascend_parallel.sharding.layout import Layout, Shape, bounds
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.collectives import note
from ascend_parallel.sharding.redistribute.costs import SEND

# The exchange's own tag, so that it meets no program's own sends.
TAG = 1 << 23

Box = tuple[tuple[int, int], ...]
"""[start, stop) of every tensor dimension."""


@dataclass(frozen=True)
class Transfer:
    """A block of the whole tensor that `receiver` has from `sender`, by global rank; from itself it is a copy."""

    sender: int
    receiver: int
    box: Box

    @property
    def elements(self) -> int:
        """Elements of the block."""
        return prod(stop - start for start, stop in self.box)


@lru_cache(maxsize=1024)
def transfers(
    shape: Shape, source_mesh: ProcessMesh, source: Layout, target_mesh: ProcessMesh, target: Layout
) -> tuple[Transfer, ...]:
    """Return who gives what to whom: a pure function, so every rank finds the same.

    `source` has no partial states. A rank keeps what it has; of several that have a block, the one with the fewest
    elements to send so far gives it, of equals the lowest rank.
    """
    owners: dict[Box, list[int]] = {}
    for rank in sorted(source_mesh.process_ids):
        owners.setdefault(_box(shape, source_mesh, source, rank), []).append(rank)
    load = dict.fromkeys(source_mesh.process_ids, 0)
    found = []
    for receiver in sorted(target_mesh.process_ids):
        if not _receives(target_mesh, target, receiver):
            continue
        wanted = _box(shape, target_mesh, target, receiver)
        for held, ranks in owners.items():
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True))
            if any(start >= stop for start, stop in box):
                continue
            sender = receiver if receiver in ranks else min(ranks, key=lambda rank: (load[rank], rank))
            transfer = Transfer(sender, receiver, box)
            load[sender] += transfer.elements if sender != receiver else 0
            found.append(transfer)
    return tuple(found)


def exchange(
    local: torch.Tensor,
    shape: Sequence[int],
    source_mesh: ProcessMesh,
    source: Layout,
    target_mesh: ProcessMesh,
    target: Layout,
) -> torch.Tensor:
    """Return this rank's part on the target mesh, empty if it is not in it.

    local
        This rank's part on the source mesh; whatever, of the right dtype and device, if it is not in it.

    Every rank of both meshes has to call it. Does not differentiate.
    """
    whole, rank = tuple(shape), dist.get_rank()
    own = [
        one for one in transfers(whole, source_mesh, source, target_mesh, target) if rank in (one.sender, one.receiver)
    ]
    blocks, operations = {}, []
    for one in own:
        if one.sender == rank:
            blocks[one] = _part(local, one.box, _box(whole, source_mesh, source, rank)).contiguous()
        else:
            blocks[one] = local.new_empty([stop - start for start, stop in one.box])
        if one.sender == one.receiver:
            continue
        sends = one.sender == rank
        if sends:
            note(SEND, -1, one.elements * local.element_size())
        way, peer = (dist.isend, one.receiver) if sends else (dist.irecv, one.sender)
        operations.append(dist.P2POp(way, blocks[one], peer, tag=TAG))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    if target_mesh.coordinate(rank) is None:
        return nothing(local, len(whole))
    box = _box(whole, target_mesh, target, rank)
    result = local.new_zeros([stop - start for start, stop in box])
    for one, block in blocks.items():
        if one.receiver == rank:
            _part(result, one.box, box).copy_(block)
    return result


def nothing(like: torch.Tensor, dims: int) -> torch.Tensor:
    """Return what a rank holds of a tensor of `dims` dimensions whose mesh it is not in (of a scalar, a zero)."""
    # of as many dimensions as the whole: torch computes strides from it on the way back
    return like.new_zeros((0,) * dims)


def _box(shape: Shape, mesh: ProcessMesh, layout: Layout, rank: int) -> Box:
    place = mesh.coordinate(rank)
    assert place is not None
    return tuple(bounds(shape, layout, mesh.shape, place))


def _receives(mesh: ProcessMesh, layout: Layout, rank: int) -> bool:
    """Tell whether the rank holds values: in a sum the first of its line does, the others hold zeros."""
    place = mesh.coordinate(rank)
    assert place is not None
    return not any(index for index, state in zip(place, layout, strict=True) if state.op == "sum")


def _part(x: torch.Tensor, box: Box, within: Box) -> torch.Tensor:
    """Return the view of `x`, which holds `within`, that holds `box`."""
    for dim, ((start, stop), (first, _)) in enumerate(zip(box, within, strict=True)):
        x = x.narrow(dim, start - first, stop - start)
    return x
