"""A planned model that runs its own code on DTensors, collectives where the plan has them and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.arguments import TENSOR
from ascend_parallel.sharding.graph import BUFFER, PARAMETER, Value
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.reshard import layout_of
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.eager_forward import Following
from ascend_parallel.sharding.runtime.eager_state import Eager, nodes_of
from ascend_parallel.sharding.runtime.input_checks import confirm_same_plan, given_tensors
from ascend_parallel.sharding.runtime.local_parameters import by_tensor, check_model, local_slice
from ascend_parallel.sharding.runtime.redistribute_autograd import convert

STATE = "_ascend_parallel"


class _Eager:
    """Comes before a model's class."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a run is followed call by call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, whole on every rank, for whole (or local) inputs."""
        state: Eager = vars(self)[STATE]
        return _run(state, self, super().forward, args, kwargs)  # type: ignore[arg-type, misc]


def make_eager(model: torch.nn.Module, plan: ShardingPlan, *, local_inputs: bool, settings: Settings) -> None:
    """Shard a model in place, and have its forward follow the plan; see `parallelize`."""
    if isinstance(model, _Eager):
        raise ValueError(f"{type(model).__name__} is parallelized already")
    if "forward" in vars(model):
        raise ValueError(f"{type(model).__name__} has a forward of its own beside its class's: make it the class's")
    seed = confirm_same_plan(plan, model, settings, overlap=False)
    plan.mesh.device_mesh()  # makes the groups, for which all ranks are needed
    state = Eager(model, plan, local_inputs, seed)
    _shard(model, plan, state.coordinate)
    vars(model)[STATE] = state
    kind = type(model)
    model.__class__ = type(kind.__name__, (_Eager, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _shard(model: torch.nn.Module, plan: ShardingPlan, coordinate: Sequence[int]) -> None:
    """Put DTensors in place of parameters and buffers; tied ones stay tied, what has no layout is whole."""
    nodes = nodes_of(plan, PARAMETER, BUFFER)
    check_model(model, nodes)
    laid = by_tensor(model, {node.source: plan.layouts[Value(node.name)] for node in nodes})
    made: dict[torch.Tensor, torch.Tensor] = {}

    def sharded(whole: torch.Tensor) -> torch.Tensor:
        if whole not in made:
            layout = laid.get(whole, (REPLICATE,) * plan.mesh.ndim)
            local = local_slice(whole, layout, plan.mesh.shape, coordinate)
            placements = [state.placement for state in layout]
            one = DTensor.from_local(local, plan.mesh.device_mesh(), placements, run_check=False)
            is_parameter = isinstance(whole, torch.nn.Parameter)
            made[whole] = torch.nn.Parameter(one, whole.requires_grad) if is_parameter else one
        return made[whole]

    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            tensors.update({name: sharded(whole) for name, whole in tensors.items() if whole is not None})


def collective_counts(model: torch.nn.Module) -> Counter[CollectiveEvent]:
    """Return how often each collective of an eagerly run model ran so far; to be looked at, and cleared."""
    if STATE not in vars(model):
        raise ValueError(f"{type(model).__name__} was not parallelized with static=False")
    state: Eager = vars(model)[STATE]
    return state.collective_counts


def _run(
    state: Eager, model: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what the forward returns, whole on every rank."""
    given = given_tensors(state.plan, state.coordinate if state.local_inputs else None, args, kwargs)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    following = Following(state, held)
    shown = following.inputs(given)
    args, kwargs = _arranged(state.plan, shown)
    with following:
        returned = forward(*args, **kwargs)
    whole = following.outputs(returned)
    _update(state.plan, model, following.updates())
    return whole


def _arranged(plan: ShardingPlan, shown: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as they were traced, tensors replaced."""
    binding = plan.graph.binding
    if binding is None:
        return tuple(shown), {}
    tensors = iter(shown)
    leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in binding.leaves]
    return pytree.tree_unflatten(leaves, binding.spec)  # type: ignore[no-any-return]


def _update(plan: ShardingPlan, model: torch.nn.Module, values: Mapping[Value, torch.Tensor]) -> None:
    """Take what the forward computed for buffers, running statistics."""
    for name, value in plan.graph.updates.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        old, shape = getattr(owner, leaf), plan.graph.meta(value).shape
        target = layout_of(old.placements, plan.mesh, old.ndim)
        with torch.no_grad():
            new = convert(values[value], shape, plan.mesh, plan.layouts[value], target, plan.costs)
        # A tensor of its own: the old one may be kept for backward.
        setattr(owner, leaf, DTensor(new.clone(), old._spec, requires_grad=False))  # type: ignore[no-untyped-call]
