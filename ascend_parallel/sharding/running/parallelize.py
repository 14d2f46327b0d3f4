"""The door to a running plan."""

from __future__ import annotations

import torch

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.planner.plan import ShardingPlan
from ascend_parallel.sharding.running.execute import ShardedModule


def parallelize(
    model: torch.nn.Module,
    plan: ShardingPlan,
    *,
    overlap: bool = True,
    settings: Settings | None = None,
    local_inputs: bool = False,
) -> ShardedModule:
    """Return this rank's part of `model` as `plan` lays it out. Every rank of the default group calls it alike.

    model
        The one that was traced, with the same values on every rank; it is not changed.
    overlap
        Run matmuls next to a collective by the overlapped operators where that can be (`ShardedModule.fused`).
    settings
        Of these operators; by default those in force (`ascend_parallel.configure`).
    local_inputs
        Every rank gives its part of the inputs, laid out as the plan says, and not the whole of them.

    Raises `DisagreementError` on every rank if plans or settings differ or a rank does not come; `ValueError` for a
    rank that is not in the plan's mesh, and a model that is not the plan's.
    """
    return ShardedModule(model, plan, overlap=overlap, settings=settings, local_inputs=local_inputs)
