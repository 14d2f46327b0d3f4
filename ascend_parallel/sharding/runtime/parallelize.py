"""The door to a running plan."""

from __future__ import annotations

from typing import Literal, TypeVar, overload

import torch

from ascend_parallel.current import current_settings
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.eager_module import make_eager
from ascend_parallel.sharding.runtime.gradient_plan import BUCKET_BYTES
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule

M = TypeVar("M", bound=torch.nn.Module)


@overload
def parallelize(
    model: torch.nn.Module,
    plan: ShardingPlan,
    *,
    static: Literal[True],
    overlap: bool | None = None,
    settings: Settings | None = None,
    local_inputs: bool = False,
    recompute: Recompute | None = None,
    bucket_bytes: int | None = None,
) -> ShardedModule: ...
@overload
def parallelize(model: M, plan: ShardingPlan, *, static: Literal[False] = False, local_inputs: bool = False) -> M: ...
def parallelize(
    model: torch.nn.Module,
    plan: ShardingPlan,
    *,
    static: bool = False,
    overlap: bool | None = None,
    settings: Settings | None = None,
    local_inputs: bool = False,
    recompute: Recompute | None = None,
    bucket_bytes: int | None = None,
) -> torch.nn.Module:
    """Return this rank's part of `model` as `plan` lays it out. Every rank of the default group calls it alike.

    model
        The one that was traced, with the same values on every rank. Eagerly it is changed in place: its parameters and
        buffers become DTensors (make the optimizer afterwards). With `static` it stays as it was.
    static
        False: the model's own Python runs, hooks and prints and all, its calls on DTensors as the plan says; the
        collectives are the plan's (`collective_counts` counts them). True: the traced graph runs, as a `ShardedModule`.
    overlap
        Of the graph only: run matmuls next to a collective by the overlapped operators where that can be
        (`ShardedModule.fused`). By default it does.
    settings
        Of these operators; by default those in force (`ascend_parallel.configure`).
    local_inputs
        Every rank gives its part of the inputs, laid out as the plan says, and not the whole of them.
    recompute
        Of the graph only: what is computed again in backward, by default what modules are marked with
        (`ascend_parallel.training.recompute`). EagerRunner marked modules compute again by themselves.
    bucket_bytes
        Of the graph only: gradients are summed in buckets of as many bytes (25 MB) under backward, and collectives
        start ahead of what reads them, small ones together; 0: each runs where it stands. A parameter's hooks need 0.

    Raises `DisagreementError` on every rank if plans or settings differ or a rank does not come; `ValueError` for a
    rank that is not in the plan's mesh, a model that is not the plan's, and one that cannot be run eagerly.
    """
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings={settings!r}: give ascend_parallel.Settings, or None for those in force")
    if static:
        return ShardedModule(
            model,
            plan,
            overlap=overlap is not False,
            settings=settings,
            local_inputs=local_inputs,
            recompute=recompute,
            bucket_bytes=BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
        )
    of_graph = {"overlap": overlap or None, "settings": settings, "recompute": recompute, "bucket_bytes": bucket_bytes}
    for name, given in of_graph.items():
        if given is not None:
            raise ValueError(f"{name}={given} is of the graph: give static=True with it")
    make_eager(model, plan, local_inputs=local_inputs, settings=current_settings())
    return model
