"""The collectives that a planned model ran outside of its overlapped operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep


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


@dataclass(frozen=True)
class Counting:
    """Counts the collectives of a redistribution: an `Observer`."""

    counts: Counter[CollectiveEvent]
    mesh: ProcessMesh
    module: str
    value: Value
    reader: str

    def __call__(self, direction: str, step: RedistributeStep) -> None:
        """Count a collective."""
        dim = self.mesh.dim_names[step.mesh_dim]
        self.counts[CollectiveEvent(step.kind, dim, self.module, self.value, self.reader, direction)] += 1
