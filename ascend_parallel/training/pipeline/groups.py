"""The meshes and process groups of a pipeline: for sends between stages, and for parameters that stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.training.pipeline.stage_assignment import StageError


@dataclass(frozen=True)
class Groups:
    """A rank's groups.

    index
        The index of the rank's mesh among the pipeline's meshes.
    along
        The ranks at the same place of all meshes, in the order of the meshes.
    mesh
        All ranks of the rank's mesh.
    """

    index: int
    along: dist.ProcessGroup
    mesh: dist.ProcessGroup


def check_meshes(meshes: Sequence[ProcessMesh]) -> None:
    """Raise `StageError` unless there are meshes and no rank is in two of them."""
    if not meshes:
        raise StageError("meshes=(): give a mesh for each group of ranks")
    ranks = [rank for mesh in meshes for rank in mesh.process_ids]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise StageError(
            f"rank {', '.join(map(str, twice))} is in several meshes; for several stages on the same ranks give their "
            "mesh once, and a schedule such as interleaved_1f1b"
        )


def make_groups(meshes: Sequence[ProcessMesh], timeout: timedelta) -> Groups:
    """Return this rank's groups, with timeout `timeout`. Every rank of the default group must call it.

    Raises `ValueError` for a rank that is in no mesh.
    """
    rank, group_of_mesh, everywhere = dist.get_rank(), [], tuple(range(len(meshes)))
    for mesh in meshes:
        mesh.device_mesh()
        group_of_mesh.append(dist.new_group(mesh.process_ids, timeout=timeout))
    along = make_shared_groups([everywhere], meshes, timeout).get(everywhere)
    if along is None:
        raise ValueError(f"rank {rank} is in none of {', '.join(map(str, meshes))}, so it has no part of the pipeline")
    index = next(index for index in everywhere if rank in meshes[index].process_ids)
    return Groups(index, along, group_of_mesh[index])


def make_shared_groups(
    shared: Sequence[tuple[int, ...]], meshes: Sequence[ProcessMesh], timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return this rank's group for each set of meshes that share a parameter: the ranks at this rank's place.

    A set lists the indices of meshes. Every rank of the default group must call it with the same sets.
    """
    rank, found = dist.get_rank(), {}
    for holders in sorted(set(shared)):
        for place in np.ndindex(meshes[0].shape):
            ranks = [int(meshes[holder].array[place]) for holder in holders]
            group = dist.new_group(ranks, timeout=timeout, sort_ranks=False)
            if rank in ranks:
                found[holders] = group
    return found
