"""The collectives that an operator runs itself, on the mesh of a planned model."""

from __future__ import annotations

import torch

from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.op_collectives import all_reduce_step
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.redistribute_local import redistribute_local
from ascend_parallel.sharding.redistribute.shortest_path import Redistribution
from ascend_parallel.sharding.rules.local import AllReduce
from ascend_parallel.sharding.runtime.redistribute_autograd import Observer


def all_reducer(mesh: ProcessMesh, costs: MeshCosts, observer: Observer) -> AllReduce:
    """Return the all-reduce that a rule's `run` calls: ``all_reduce(tensor, mesh_dim, op)``."""
    whole = (REPLICATE,) * mesh.ndim

    def all_reduce(tensor: torch.Tensor, mesh_dim: int, op: str) -> torch.Tensor:
        step = all_reduce_step(mesh_dim, tensor.numel() * tensor.element_size(), op, costs)
        observer("forward", step)
        source = (*whole[:mesh_dim], step.source, *whole[mesh_dim + 1 :])
        return redistribute_local(tensor, tensor.shape, mesh, Redistribution(source, whole, (step,)))

    return all_reduce
