"""The collectives that an operator runs itself, as redistribution steps with their costs."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE, Layout, Placement
from ascend_parallel.sharding.redistribute.costs import ALL_REDUCE, MeshCosts, sent
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.rules import own_reductions


def op_collective_steps(call: OpCall, layouts: Sequence[Layout], costs: MeshCosts) -> tuple[RedistributeStep, ...]:
    """Return the all-reduces that an operator runs in forward, with inputs in these layouts."""
    reductions = own_reductions(call, layouts, costs.shape)
    return tuple(all_reduce_step(reduction.mesh_dim, reduction.nbytes, reduction.op, costs) for reduction in reductions)


def all_reduce_step(mesh_dim: int, nbytes: float, op: str, costs: MeshCosts) -> RedistributeStep:
    """Return the step of an all-reduce along a mesh dimension, of `nbytes` on each rank."""
    seconds, sent_bytes = costs.seconds(ALL_REDUCE, nbytes, mesh_dim), sent(ALL_REDUCE, nbytes, costs.shape[mesh_dim])
    return RedistributeStep(ALL_REDUCE, mesh_dim, Placement("partial", op=op), REPLICATE, sent_bytes, seconds)
