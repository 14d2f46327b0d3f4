"""`parallelize`: a model's own Python runs by a plan. `ShardedModule` runs the traced graph in its place."""

from __future__ import annotations

from typing import TypeVar

import torch

from ascend_parallel.current import current_settings
from ascend_parallel.sharding.planner.batch_norms import has_local_batch_norms
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.eager_module import make_eager

M = TypeVar("M", bound=torch.nn.Module)


def parallelize(model: M, plan: ShardingPlan, *, local_inputs: bool = False) -> M:
    """Make a model run as `plan` lays it out, in place, and return it. Every rank calls this alike.

    The model's own Python runs, with hooks and prints, on DTensors whose propagation the plan controls; the collectives
    are the plan's (`collective_counts` counts them). Modules that `ascend_parallel.training.recompute` marks run under
    torch.utils.checkpoint. `ShardedModule` runs the traced graph instead, with overlapped operators.

    model
        The traced model, with the same values on every rank. Its parameters and buffers become DTensors: make the
        optimizer afterwards.
    local_inputs
        Every rank passes its local part of the inputs, laid out as in the plan, instead of the global inputs.

    Raises `DisagreementError` on every rank if plans differ or a rank is missing; `ValueError` for a rank outside of
    the plan's mesh, a model other than the plan's, and a model that cannot run eagerly.
    """
    if has_local_batch_norms(plan.graph):
        raise ValueError('the plan has batch_norm="local": the model\'s own Python has no such norm; use ShardedModule')
    make_eager(model, plan, local_inputs=local_inputs, settings=current_settings())
    return model
