"""The collectives that a planned model ran, outside of overlapped operators."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_parallel.sharding.graph import Node, Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective of a kind, such as "all_reduce", along a mesh dimension, outside of overlapped operators.

    module
        Path of the module that reads the tensor; of the one that makes it, if it is converted for several readers.
    value, reader
        The tensor, and the node that reads it: "" for the user, "shared" for several, "inside" for a collective of the
        operator that makes the tensor, "gradients" for terms of parameters' gradients that are summed as one, of which
        the tensor is the first (gradients.py).
    direction
        "forward" or "backward".
    """

    kind: str
    mesh_dim: str
    module: str
    value: Value
    reader: str
    direction: str


def op_collective_event(node: Node, mesh: ProcessMesh, step: RedistributeStep) -> CollectiveEvent:
    """Return a collective that an operator ran itself."""
    return CollectiveEvent(step.kind, mesh.dim_names[step.mesh_dim], node.module, Value(node.name), "inside", "forward")
