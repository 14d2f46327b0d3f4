"""The meshes and process groups of a pipeline, and the parameters that several stages read.

Such a parameter is an embedding tied to the head. The gradients of its copies are summed: all terms are gathered and
added in the order of the meshes, so the copies stay bitwise equal. Between meshes of different shapes each rank
receives the part of the other meshes' gradients that it holds itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.local_parameters import parameters_of
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.training.pipeline.cross_mesh_sums import CrossMeshSums
from ascend_parallel.training.pipeline.split_plan import StagePlan, is_mixed, shared_parameters
from ascend_parallel.training.pipeline.stage_assignment import StageError


@dataclass(frozen=True)
class Groups:
    """A rank's groups.

    index
        The index of the rank's mesh among the pipeline's meshes.
    along
        The ranks at the same place of all meshes, in the order of the meshes.
        If meshes have different shapes: one rank of each mesh, this rank of its own; only for stages to find theirs.
    mesh
        All ranks of the rank's mesh.
    everybody
        The ranks of all meshes, if meshes have different shapes; else None.
    timed
        A group, and ranks of it, one of each mesh, whose times a measured step reports.
    """

    index: int
    along: dist.ProcessGroup
    mesh: dist.ProcessGroup
    everybody: dist.ProcessGroup | None
    timed: tuple[dist.ProcessGroup, tuple[int, ...]]


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
    mixed = is_mixed(meshes)
    along = _lines(meshes, timeout) if mixed else make_shared_groups([everywhere], meshes, timeout).get(everywhere)
    together = (
        dist.new_group([each for mesh in meshes for each in mesh.process_ids], timeout=timeout) if mixed else None
    )
    if along is None:
        raise ValueError(f"rank {rank} is in none of {', '.join(map(str, meshes))}, so it has no part of the pipeline")
    index = next(index for index in everywhere if rank in meshes[index].process_ids)
    if together is None:
        return Groups(index, along, group_of_mesh[index], None, (along, tuple(dist.get_process_group_ranks(along))))
    firsts = tuple(mesh.process_ids[0] for mesh in meshes)
    return Groups(index, along, group_of_mesh[index], together, (together, firsts))


def _lines(meshes: Sequence[ProcessMesh], timeout: timedelta) -> dist.ProcessGroup | None:
    """Return, of groups with a rank of each mesh, the one of this rank's place; a smaller mesh's ranks are in several.

    Every rank of the default group must call it.
    """
    found, rank = None, dist.get_rank()
    for place in range(max(len(mesh.process_ids) for mesh in meshes)):
        ranks = [mesh.process_ids[place % len(mesh.process_ids)] for mesh in meshes]
        group = dist.new_group(ranks, timeout=timeout, sort_ranks=False)
        if found is None and rank in ranks:  # a rank's own place comes before the places that repeat it
            found = group
    return found


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


class SharedGradients:
    """Sums the gradients of parameters that this rank's stages share with other stages.

    due
        Whether a step has run since the last sum.
    meshes
        For each of this rank's shared parameters, the number of meshes that hold it.
    repeated
        Copies that an earlier stage of this rank holds too. They share its memory; only the earlier copy is updated.
    """

    def __init__(
        self,
        parts: Sequence[StagePlan],
        mesh_of_stage: Sequence[int],
        modules: Sequence[ShardedModule],
        meshes: Sequence[ProcessMesh],
        timeout: timedelta,
        everybody: dist.ProcessGroup | None = None,
    ) -> None:
        """Take all stages, the index of each stage's mesh, and this rank's modules. Every rank must call it.

        everybody
            The ranks of all meshes, if meshes have different shapes.
        """
        stages_by_name = shared_parameters(parts)
        self._holders = {
            name: tuple(sorted({mesh_of_stage[stage] for stage in stages})) for name, stages in stages_by_name.items()
        }
        several = [holders for holders in self._holders.values() if len(holders) > 1]
        self._groups = {} if everybody is not None else make_shared_groups(several, meshes, timeout)
        across = CrossMeshSums(parts, mesh_of_stage, everybody) if everybody is not None else None
        self._across = across
        self._copies = {
            name: [module.get_parameter(name) for module in modules if name in module.held] for name in stages_by_name
        }
        for copies in self._copies.values():
            for copy in copies[1:]:
                copy.data = copies[0].data
        self.meshes = {copy: len(self._holders[name]) for name, copies in self._copies.items() for copy in copies}
        self.repeated = frozenset(copy for copies in self._copies.values() for copy in copies[1:])
        self.due = self._summed = False

    def check_cleared(self, modules: Sequence[nn.Module]) -> None:
        """Raise `RuntimeError` if a step would add to gradients of these modules that were summed."""
        held = [parameter for module in modules for parameter in parameters_of(module)] if self._summed else []
        for parameter in held:
            if parameter.grad is not None:
                raise RuntimeError(
                    "the gradients are summed over ranks, and a step would add unsummed gradients to them: call "
                    "zero_grad(set_to_none=True) before, or reduce_gradients() after the last of several steps"
                )
        self._summed = False

    def sum(self, unsummed: Sequence[str] = ()) -> None:
        """Give a rank's first copy the sum of all copies' gradients. Every rank must call it, after a step.

        unsummed
            The mesh dimensions over which the caller sums gradients later.
        """
        for name, copies in self._copies.items() if self.due else ():
            if not copies or not copies[0].requires_grad:
                continue
            own = _sum([_gradient(copy) for copy in copies])
            group = self._groups.get(self._holders[name])
            if self._across is not None and len(self._holders[name]) > 1:
                own = self._across.sum(name, own, self._holders[name], unsummed)
            elif group is not None:
                by_mesh = [torch.empty_like(own) for _ in range(group.size())]
                run_collective("the sum of a shared gradient", dist.all_gather, by_mesh, own.contiguous(), group=group)
                own = _sum(by_mesh)
            for copy in copies:
                copy.grad = None
            copies[0].grad = own
        self.due, self._summed = False, True


def _gradient(copy: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, zeros if it has none."""
    return torch.zeros_like(copy, dtype=grad_dtype(copy)) if copy.grad is None else copy.grad


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
