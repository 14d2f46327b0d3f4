"""`parallelize`: a model's own Python runs by a plan. `ShardedModule` runs the traced graph in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch._export.utils import _compiling_state_context
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.graph import BUFFER, PARAMETER, TENSOR, Value, in_place_of
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.batch_norms import has_local_batch_norms
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.eager_forward import EagerForward
from ascend_parallel.sharding.runtime.eager_state import EagerState
from ascend_parallel.sharding.runtime.input_checks import confirm_same_plan, input_tensors
from ascend_parallel.sharding.runtime.local_parameters import by_tensor, check_model, local_slice

STATE = "_ascend_parallel"


class _EagerMixin:
    """The mix-in that `parallelize` puts in front of a model's class."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # each call is compared with the traced call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, global on every rank, for global inputs (or local, with `local_inputs`)."""
        state: EagerState = vars(self)[STATE]
        tensors = input_tensors(state.plan, state.coordinate if state.local_inputs else None, args, kwargs)
        run = EagerForward(state, self)  # type: ignore[arg-type]
        args, kwargs = _arranged(state.plan, run.inputs(tensors))
        # code that asks whether it is traced, as the masks of transformers do, takes the branch that was traced
        with _compiling_state_context(), run:
            returned = super().forward(*args, **kwargs)  # type: ignore[misc]
        outputs = run.outputs(returned)
        run.store_updates()
        return outputs


def _shard(model: torch.nn.Module, plan: ShardingPlan, coordinate: Sequence[int]) -> None:
    """Replace parameters and buffers by DTensors. Tied tensors stay tied; tensors without a layout are replicated."""
    nodes = plan.graph.of_kind(PARAMETER, BUFFER)
    check_model(model, nodes)
    layouts = by_tensor(model, {node.source: plan.layouts[Value(node.name)] for node in nodes})
    dtensors: dict[torch.Tensor, torch.Tensor] = {}

    def sharded(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in dtensors:
            layout = layouts.get(tensor, (REPLICATE,) * plan.mesh.ndim)
            local = local_slice(tensor, layout, plan.mesh.shape, coordinate)
            placements = [placement.placement for placement in layout]
            dtensor = DTensor.from_local(local, plan.mesh.device_mesh(), placements, run_check=False)
            dtensors[tensor] = in_place_of(tensor, dtensor)
        return dtensors[tensor]

    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            tensors.update({name: sharded(tensor) for name, tensor in tensors.items() if tensor is not None})


def collective_counts(model: torch.nn.Module) -> Counter[CollectiveEvent]:
    """Return the number of runs of each collective of an eager model. The caller may clear the counter."""
    if STATE not in vars(model):
        raise ValueError(f"{type(model).__name__} is not an eager model: call parallelize(model, plan) before")
    state: EagerState = vars(model)[STATE]
    return state.collective_counts


def _arranged(plan: ShardingPlan, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the traced arguments with these tensors in place of the traced tensors."""
    binding = plan.graph.binding
    if binding is None:
        return tuple(inputs), {}
    tensors = iter(inputs)
    leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in binding.leaves]
    return pytree.tree_unflatten(leaves, binding.spec)  # type: ignore[no-any-return]


M = TypeVar("M", bound=torch.nn.Module)


def parallelize(
    model: M, plan: ShardingPlan, *, local_inputs: bool = False, overlap: bool = False, settings: Settings | None = None
) -> M:
    """Make a model run as `plan` lays it out, in place, and return it. Every rank calls this alike.

    The model's own Python runs, with hooks and prints, on DTensors whose propagation the plan controls; the collectives
    are the plan's (`collective_counts` counts them). Modules that `ascend_parallel.training.recompute` marks run under
    torch.utils.checkpoint. `ShardedModule` runs the traced graph instead, with less work on the host.

    model
        The traced model, with the same values on every rank. Its parameters and buffers become DTensors: make the
        optimizer afterwards.
    local_inputs
        Every rank passes its local part of the inputs, laid out as in the plan, instead of the global inputs.
    overlap
        Run matmuls overlapped with their collectives, as `ShardedModule` does; matmuls of the same input as one, at the
        first of their calls.
    settings
        Settings of the overlapped operators. Default: the current settings (`ascend_parallel.configure`).

    Raises `DisagreementError` on every rank if plans differ or a rank is missing; `ValueError` for a rank outside of
    the plan's mesh, a model other than the plan's, and a model that cannot run eagerly.
    """
    if has_local_batch_norms(plan.graph):
        raise ValueError('the plan has batch_norm="local": the model\'s own Python has no such norm; use ShardedModule')
    if isinstance(model, _EagerMixin):
        raise ValueError(f"{type(model).__name__} is parallelized already")
    if "forward" in vars(model):
        raise ValueError(f"forward of {type(model).__name__} is set on the instance: define forward in the class")
    settings = settings or current_settings()
    seed = confirm_same_plan(plan, model, settings, overlap=overlap)
    plan.mesh.device_mesh()  # makes the process groups: every rank must call it
    state = EagerState(model, plan, local_inputs=local_inputs, overlap=settings if overlap else None, seed=seed)
    _shard(model, plan, state.coordinate)
    vars(model)[STATE] = state
    kind = type(model)
    model.__class__ = type(kind.__name__, (_EagerMixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return model
