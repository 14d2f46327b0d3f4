"""The entry point `parallelize`: a model and a plan become this rank's part of the model."""

from __future__ import annotations

from typing import Literal, TypeVar, overload

import torch

from ascend_parallel.current import current_settings
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.planner.batch_norms import has_local_batch_norms
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
    compile: str | None = None,
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
    compile: str | None = None,
) -> torch.nn.Module:
    """Return this rank's part of `model` as `plan` lays it out. Every rank of the default group must call this alike.

    model
        The traced model, with the same values on every rank. Without `static` its parameters and buffers become
        DTensors in place (make the optimizer afterwards). With `static` the model is not changed.
    static
        False: the model's own Python runs, with hooks and prints, on DTensors whose propagation the plan controls; the
        collectives are the plan's (`collective_counts` counts them). True: the traced graph runs, as a `ShardedModule`.
    overlap
        With `static` only, default True: use the overlapped operators where possible (`ShardedModule.fused`).
    settings
        Settings of these operators. Default: the current settings (`ascend_parallel.configure`).
    local_inputs
        Every rank passes its local part of the inputs, laid out as in the plan, instead of the global inputs.
    recompute
        With `static` only: what backward recomputes, by default the modules marked by
        `ascend_parallel.training.recompute`. Without `static` such modules run under torch.utils.checkpoint.
    bucket_bytes
        With `static` only: bytes of a gradient bucket, by default 25 MB. Buckets are all-reduced during backward, and
        redistributions are prefetched and coalesced. 0: each collective runs at its node, as parameter hooks need.
    compile
        With `static` only: "segments" runs the operators between two collectives as one function of torch.compile. Its
        bits may differ from those of the single operators. Default None: every operator runs alone.

    Raises `DisagreementError` on every rank if plans or settings differ or a rank is missing; `ValueError` for a rank
    outside of the plan's mesh, a model other than the plan's, and a model that cannot run eagerly.
    """
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings={settings!r}: give ascend_parallel.Settings, or None for the current settings")
    if static:
        return ShardedModule(
            model,
            plan,
            overlap=overlap is not False,
            settings=settings,
            local_inputs=local_inputs,
            recompute=recompute,
            bucket_bytes=BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
            compile=compile,
        )
    _refuse_static_options(
        overlap=overlap or None, settings=settings, recompute=recompute, bucket_bytes=bucket_bytes, compile=compile
    )
    if has_local_batch_norms(plan.graph):
        raise ValueError('the plan has batch_norm="local": the model\'s own Python has no such norm; give static=True')
    make_eager(model, plan, local_inputs=local_inputs, settings=current_settings())
    return model


def _refuse_static_options(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value} is for the graph only: give static=True with it")
