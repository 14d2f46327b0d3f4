"""Sums of the gradients of parameters that meshes of different shapes share, such as an embedding tied to the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.sharding.graph import BUFFER, PARAMETER, Value
from ascend_parallel.sharding.layout import Layout, Shape, forward
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.across_meshes import redistribute_across_meshes
from ascend_parallel.training.pipeline.split_plan import StagePlan


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as the ranks of a mesh hold it."""

    mesh: ProcessMesh
    layout: Layout
    shape: Shape


class CrossMeshSums:
    """Adds, on every rank, the other meshes' gradients to its own, in the order of the meshes."""

    def __init__(self, parts: Sequence[StagePlan], mesh_of_stage: Sequence[int], everybody: dist.ProcessGroup) -> None:
        """Take all stages, the index of each stage's mesh, and a group of all ranks."""
        self._everybody = everybody
        self._held: dict[tuple[str, int], HeldParameter] = {}  # by name and index of the mesh
        for part, index in zip(parts, mesh_of_stage, strict=True):
            for node in part.plan.graph.nodes.values():
                if node.kind == PARAMETER:
                    layout = forward(part.plan.layouts[Value(node.name)])
                    self._held[node.source, index] = HeldParameter(part.plan.mesh, layout, node.outputs[0].shape)

    def sum(self, name: str, own: torch.Tensor, holders: Sequence[int], unsummed: Sequence[str]) -> torch.Tensor:
        """Return this rank's part of the sum of a parameter's gradients on the meshes of index `holders`.

        own
            This rank's part, still to be summed over the mesh dimensions `unsummed`. So is the result: it is zero but
            on the first rank along these dimensions.

        Every rank of these meshes must call it.
        """
        rank = dist.get_rank()
        index = next(each for each in holders if self._held[name, each].mesh.coordinate(rank) is not None)
        held = self._held[name, index]
        mesh, layout = held.mesh, held.layout
        later = [mesh.dim(dim) for dim in unsummed if layout[mesh.dim(dim)].kind != "shard" and mesh.size(dim) > 1]
        if later:
            own = own.clone(memory_format=torch.contiguous_format)
        for dim in later:
            run_collective("the sum of a shared gradient", dist.all_reduce, own, group=mesh.group(dim))
        terms = {index: own}
        for source in holders:
            for target in holders:
                if source == target or index not in (source, target):
                    continue
                sent, got = self._held[name, source], self._held[name, target]
                received = redistribute_across_meshes(
                    own, held.shape, sent.mesh, sent.layout, got.mesh, got.layout, self._everybody
                )
                if target == index:
                    terms[source] = received
        total = terms[holders[0]]
        for each in holders[1:]:
            total = total + terms[each]
        place = mesh.coordinate(rank)
        assert place is not None
        return torch.zeros_like(total) if any(place[dim] for dim in later) else total


def held_by_earlier_meshes(parts: Sequence[StagePlan], mesh_of_stage: Sequence[int], index: int) -> frozenset[str]:
    """Return the parameters and buffers of mesh `index` that meshes before it hold too."""
    held: Mapping[int, set[str]] = {each: set() for each in mesh_of_stage}
    for part, each in zip(parts, mesh_of_stage, strict=True):
        held[each] |= {node.source for node in part.plan.graph.nodes.values() if node.kind in (PARAMETER, BUFFER)}
    earlier = set().union(*(names for each, names in held.items() if each < index))
    return frozenset(held[index] & earlier)
