"""The collectives that a planned model ran outside of its overlapped operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ascend_parallel.sharding.graph import Node, Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.runtime.redistribute_autograd import Observer


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective of a kind, such as "all_reduce", along a mesh dimension, outside of overlapped operators.

    module
        Path of the module that reads the tensor. For a redistribution shared by several readers, the module that
        produces the tensor.
    value, reader
        The tensor, and the node that reads it. Other readers: "" is the caller, "shared" several nodes, "inside" the
        operator that produces the tensor and runs the collective itself. "gradients" is a bucket of gradient terms,
        with `value` as its first parameter (gradient_reduction.py).
    direction
        "forward" or "backward".
    """

    kind: str
    mesh_dim: str
    module: str
    value: Value
    reader: str
    direction: str


def counting(counts: Counter[CollectiveEvent], mesh: ProcessMesh, module: str, value: Value, reader: str) -> Observer:
    """Return an observer that counts the collectives of a redistribution."""

    def count(direction: str, step: RedistributeStep) -> None:
        counts[CollectiveEvent(step.kind, mesh.dim_names[step.mesh_dim], module, value, reader, direction)] += 1

    return count


def counting_inside(counts: Counter[CollectiveEvent], mesh: ProcessMesh, node: Node) -> Observer:
    """Return an observer that counts the collectives that an operator runs itself."""
    return counting(counts, mesh, node.module, Value(node.name), "inside")
