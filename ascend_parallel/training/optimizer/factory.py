"""Rebuild an ordinary torch optimizer, from its class and settings, over a rank's shards of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ascend_parallel.sharding.marked.shard_layer import ShardedStep, has_stepped

# Each element's update depends on this element alone, so any slice of a parameter can be updated by itself.
ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
# The update of these looks at a whole matrix.
OF_WHOLE_PARAMETERS = frozenset({"Adafactor", "Muon"})
REFUSED = {
    "LBFGS": "it looks at all parameters at once, and evaluates the loss several times",
    "SparseAdam": "it takes sparse gradients, which are not summed here",
}
# Attributes that every optimizer has.
_OF_EVERY = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


@dataclass(frozen=True)
class OptimizerFactory:
    """An optimizer's class and hyperparameters.

    groups
        For each parameter group, the parameters' names (all names of a tied parameter) and the hyperparameters.
    settings
        The class's arguments beside the groups.
    elementwise
        Whether slices of a parameter can be updated separately.
    """

    kind: type[torch.optim.Optimizer]
    groups: tuple[tuple[frozenset[str], Mapping[str, Any]], ...]
    settings: Mapping[str, Any]
    elementwise: bool

    def group_of(self, name: str) -> int:
        """Return the index of the parameter group that contains a parameter."""
        for index, (names, _) in enumerate(self.groups):
            if name in names:
                return index
        raise ValueError(f"{name} is in no group of the optimizer: give targets for its parameters only")

    def make(self, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """Return an optimizer over other tensors, listed for each parameter group."""
        groups = [
            {**settings, "params": list(tensors)}
            for (_, settings), tensors in zip(self.groups, parameters, strict=True)
        ]
        return self.kind(groups, **self.settings)

    def states(self) -> int:
        """Return the number of tensors of the parameter's size in the state, after a step of the first group."""
        state = self.state_of_zeros(0, torch.zeros(3, 3))
        return sum(1 for value in state.values() if isinstance(value, torch.Tensor) and value.shape == (3, 3))

    def state_of_zeros(self, group: int, like: torch.Tensor) -> dict[str, Any]:
        """Return the state after a step on zeros shaped like `like`, in group `group`."""
        parameter = torch.zeros_like(like, requires_grad=like.is_floating_point())
        parameter.grad = torch.zeros_like(like)
        optimizer = self.make([[parameter] if index == group else [] for index in range(len(self.groups))])
        optimizer.step()
        return dict(optimizer.state[parameter])


def optimizer_factory(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, elementwise: bool | None = None
) -> OptimizerFactory:
    """Return a factory that rebuilds `optimizer` over slices of the parameters of `model`.

    optimizer
        Any of torch.optim but LBFGS and SparseAdam, or a class of your own. It has made no step. It was made over the
        whole model before the model is parallelized.
    elementwise
        For a class of your own: whether each element is updated from its own values alone.

    Raises `ValueError` for an optimizer that cannot be rebuilt, or that has parameters outside the model.
    """
    kind = type(optimizer)
    known = getattr(torch.optim, kind.__name__, None) is kind
    if known and kind.__name__ in REFUSED:
        raise ValueError(f"{kind.__name__} cannot be partitioned: {REFUSED[kind.__name__]}; take Adam, for example")
    if known and kind.__name__ in ELEMENTWISE | OF_WHOLE_PARAMETERS:
        elementwise = kind.__name__ in ELEMENTWISE
    if elementwise is None:
        raise ValueError(
            f"{kind.__name__} is not known: give optimizer_factory(..., elementwise=True) if it updates each element "
            "from its own values alone, else elementwise=False"
        )
    if has_stepped(optimizer):
        raise ValueError(
            f"this {kind.__name__} has made steps: give a new optimizer, and load its state with load_tensor_shards"
        )
    if step_hooks(optimizer) or has_own_step(optimizer):
        raise ValueError(
            f"this {kind.__name__} has {'a hook of step' if step_hooks(optimizer) else 'a step of its own'}, which an "
            "optimizer rebuilt over shards would not run: register hooks on the ParallelOptimizer (step.optimizer of "
            "train_step), and write steps in a class"
        )
    names: dict[torch.Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    groups = tuple(_group(index, group, names) for index, group in enumerate(optimizer.param_groups))
    accepted = signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    factory = OptimizerFactory(kind, groups, settings, elementwise)
    _check_rebuilds(factory, optimizer)
    return factory


def step_hooks(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the hooks of an optimizer's step, without those of `shard_optimizer`, whose stage is known."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), ShardedStep)]


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `step` was replaced on the instance, but for the wrapper of torch's schedulers."""
    step, of_schedulers = vars(optimizer).get("step"), LRScheduler.__init__.__code__.co_filename
    while step is not None and getattr(getattr(step, "__code__", None), "co_filename", "") == of_schedulers:
        step = step.__wrapped__
    return step is not None and step is not type(optimizer).step


def _group(
    index: int, group: Mapping[str, Any], names: Mapping[torch.Tensor, set[str]]
) -> tuple[frozenset[str], dict[str, Any]]:
    found: set[str] = set()
    for parameter in group["params"]:
        if parameter not in names:
            raise ValueError(
                f"group {index} of the optimizer has a {list(parameter.shape)} that is not of the model: make the "
                "optimizer over this model's parameters, before it is parallelized"
            )
        found |= names[parameter]
    return frozenset(found), {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_rebuilds(factory: OptimizerFactory, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a class that keeps settings outside its groups and defaults: the rebuilt optimizer would differ."""
    rebuilt = factory.make([[] for _ in factory.groups])
    for name, value in vars(optimizer).items():
        is_plain = isinstance(value, (bool, int, float, str, tuple, type(None)))
        copied = getattr(rebuilt, name, None)
        if name not in _OF_EVERY and is_plain and copied != value:
            raise ValueError(
                f"{factory.kind.__name__} rebuilt has {name}={copied!r} and not {value!r}: keep its settings in its "
                "defaults"
            )
