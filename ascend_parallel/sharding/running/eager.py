"""A planned model that runs its own code on DTensors, collectives where the plan has them and nowhere else."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.binding import TENSOR
from ascend_parallel.sharding.calls import FunctionCall, first_names
from ascend_parallel.sharding.graph import BUFFER, CONSTANT, PARAMETER, Node, Value
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.plan import ShardingPlan
from ascend_parallel.sharding.running.agreed import confirm_alike
from ascend_parallel.sharding.running.conversion import convert
from ascend_parallel.sharding.running.following import Following
from ascend_parallel.sharding.running.forward import Ran
from ascend_parallel.sharding.running.given import given_tensors
from ascend_parallel.sharding.running.holding import by_tensor, check_model, local_slice
from ascend_parallel.sharding.running.randomness import Randomness
from ascend_parallel.sharding.tensors.reshard import layout_of

STATE = "_ascend_parallel"


class Eager:
    """What a model needs to run by a plan.

    ran
        How often each collective ran so far.
    calls
        The traced forward's.
    by_values
        The calls' places by function and the values that they read.
    constants
        This rank's parts, by node.
    updated
        New values of buffers that the forward writes.
    randomness
        What seeds random operators.
    """

    def __init__(self, model: torch.nn.Module, plan: ShardingPlan, local_inputs: bool, seed: int) -> None:
        """Take a model that is whole, and its plan; raises `ValueError` where they do not fit."""
        place = plan.mesh.coordinate(dist.get_rank())
        if place is None:
            raise ValueError(f"rank {dist.get_rank()} is not in {plan.mesh}, so it has no part of the model")
        self.plan, self.local_inputs, self.coordinate = plan, local_inputs, place
        self.randomness = Randomness(seed)
        self.calls, self.ran = _calls(plan), Counter[Ran]()
        self.by_values: dict[Any, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            values = tuple(leaf for leaf in call.arguments if isinstance(leaf, Value))
            self.by_values[call.function, values].append(number)
        self.updated = frozenset(plan.graph.updates.values())
        self.constants = {node.name: self._constant(node) for node in _nodes(plan, CONSTANT)}
        self._first = first_names(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Eager:
        """Return the state of a copy of the model."""
        made = copy.copy(self)
        made.ran, made.randomness = Counter(), copy.copy(self.randomness)
        return made

    def run(
        self, model: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what the forward returns, whole on every rank."""
        given = given_tensors(self.plan, self.coordinate if self.local_inputs else None, args, kwargs)
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        following = Following(self, held)
        shown = following.inputs(given)
        args, kwargs = self._arranged(shown)
        with following:
            returned = forward(*args, **kwargs)
        whole = following.outputs(returned)
        self._update(model, following.updates())
        return whole

    def part(self, node: Node, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a parameter or buffer, as a leaf's view through which its gradient comes."""
        tensor, layout = held[self._first[node.source]], self.plan.layouts[Value(node.name)]
        placements = tuple(state.placement for state in layout)
        if not isinstance(tensor, DTensor) or tensor.placements != placements:
            raise ValueError(f"{node.source} is no longer the tensor of placements {list(placements)} that it was")
        return tensor.to_local(grad_placements=placements)

    def _arranged(self, shown: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were traced, tensors replaced."""
        binding = self.plan.graph.binding
        if binding is None:
            return tuple(shown), {}
        tensors = iter(shown)
        leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in binding.leaves]
        return pytree.tree_unflatten(leaves, binding.spec)  # type: ignore[no-any-return]

    def _update(self, model: torch.nn.Module, values: Mapping[Value, torch.Tensor]) -> None:
        """Take what the forward computed for buffers, running statistics."""
        plan = self.plan
        for name, value in plan.graph.updates.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            old, shape = getattr(owner, leaf), plan.graph.meta(value).shape
            target = layout_of(old.placements, plan.mesh, old.ndim)
            with torch.no_grad():
                new = convert(values[value], shape, plan.mesh, plan.layouts[value], target, plan.costs)
            # A tensor of its own: the old one may be kept for backward.
            setattr(owner, leaf, DTensor(new.clone(), old._spec, requires_grad=False))  # type: ignore[no-untyped-call]

    def _constant(self, node: Node) -> torch.Tensor:
        whole, layout = self.plan.graph.constants[node.source], self.plan.layouts[Value(node.name)]
        return local_slice(whole, layout, self.plan.mesh.shape, self.coordinate)


class _Eager:
    """Comes before a model's class."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a run is followed call by call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, whole on every rank, for whole (or local) inputs."""
        state: Eager = vars(self)[STATE]
        return state.run(self, super().forward, args, kwargs)  # type: ignore[arg-type, misc]


def make_eager(model: torch.nn.Module, plan: ShardingPlan, *, local_inputs: bool, settings: Settings) -> None:
    """Shard a model in place, and have its forward follow the plan; see `parallelize`."""
    if isinstance(model, _Eager):
        raise ValueError(f"{type(model).__name__} is parallelized already")
    if "forward" in vars(model):
        raise ValueError(f"{type(model).__name__} has a forward of its own beside its class's: make it the class's")
    seed = confirm_alike(plan, model, False, settings)
    plan.mesh.device_mesh()  # makes the groups, for which all ranks are needed
    state = Eager(model, plan, local_inputs, seed)
    _shard(model, plan, state.coordinate)
    vars(model)[STATE] = state
    kind = type(model)
    model.__class__ = type(kind.__name__, (_Eager, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _shard(model: torch.nn.Module, plan: ShardingPlan, coordinate: Sequence[int]) -> None:
    """Put DTensors in place of parameters and buffers; tied ones stay tied, what has no layout is whole."""
    nodes = _nodes(plan, PARAMETER, BUFFER)
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


def _calls(plan: ShardingPlan) -> tuple[FunctionCall, ...]:
    """Return the calls that a run follows; raises `ValueError` for a plan that none can follow."""
    mesh, calls = plan.mesh, plan.graph.calls
    if isinstance(calls, str):
        raise ValueError(f"the model cannot be run eagerly: {calls}. parallelize(..., static=True) runs the graph")
    if mesh.process_ids != sorted(mesh.process_ids):
        raise ValueError(
            f"{mesh} has ranks in another order than ascending, in which torch's DTensor gathers wrongly; "
            "parallelize(..., static=True) runs the graph"
        )
    return calls


def _nodes(plan: ShardingPlan, *kinds: str) -> list[Node]:
    return [node for node in plan.graph.nodes.values() if node.kind in kinds]


def ran_of(model: torch.nn.Module) -> Counter[Ran]:
    """Return how often each collective of an eagerly run model ran so far; to be looked at, and cleared."""
    if STATE not in vars(model):
        raise ValueError(f"{type(model).__name__} was not parallelized with static=False")
    state: Eager = vars(model)[STATE]
    return state.ran
