"""The collectives that an operator runs itself, as steps with their costs."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE, Layout, Placement
from ascend_parallel.sharding.redistribute.costs import ALL_REDUCE, MeshCosts, sent
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.rules import own_reductions


def op_collective_steps(call: OpCall, layouts: Sequence[Layout], costs: MeshCosts) -> tuple[RedistributeStep, ...]:
    """Return the all-reduces of an operator's forward that reads its inputs in these layouts."""
    return tuple(
        all_reduce_step(one.mesh_dim, one.nbytes, one.op, costs) for one in own_reductions(call, layouts, costs.shape)
    )


def all_reduce_step(mesh_dim: int, nbytes: float, op: str, costs: MeshCosts) -> RedistributeStep:
    """Return the all-reduce of `nbytes` that each rank gives along a mesh dimension."""
    seconds, moved = costs.seconds(ALL_REDUCE, nbytes, mesh_dim), sent(ALL_REDUCE, nbytes, costs.shape[mesh_dim])
    return RedistributeStep(ALL_REDUCE, mesh_dim, Placement("partial", op=op), REPLICATE, moved, seconds)
