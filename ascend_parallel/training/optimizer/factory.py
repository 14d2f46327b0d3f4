"""What makes an optimizer, apart from its parameters: so that it can be made again over a rank's parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

# Each element's update depends on that element alone, so that any slice of a parameter can be updated by itself.
ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
# These look at a whole matrix.
OF_WHOLE_PARAMETERS = frozenset({"Adafactor", "Muon"})
REFUSED = {
    "LBFGS": "it looks at all parameters at once, and evaluates the loss again",
    "SparseAdam": "it takes sparse gradients, which are not summed here",
}
# What an optimizer has beside its settings.
_OF_EVERY = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


@dataclass(frozen=True)
class Recipe:
    """An optimizer's class and hyperparameters.

    groups
        For each of its groups the names of the parameters (all names of a tied one), and the hyperparameters.
    settings
        What the class takes beside the groups.
    elementwise
        Whether slices of a parameter can be updated apart.
    """

    kind: type[torch.optim.Optimizer]
    groups: tuple[tuple[frozenset[str], Mapping[str, Any]], ...]
    settings: Mapping[str, Any]
    elementwise: bool

    def group_of(self, name: str) -> int:
        """Return the index of the group that has a parameter."""
        for index, (names, _) in enumerate(self.groups):
            if name in names:
                return index
        raise ValueError(f"{name} is in no group of the optimizer: give targets for its parameters only")

    def make(self, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """Return the optimizer over other parameters, given for each group."""
        given = [
            {**settings, "params": list(tensors)}
            for (_, settings), tensors in zip(self.groups, parameters, strict=True)
        ]
        return self.kind(given, **self.settings)

    def states(self) -> int:
        """Return how many tensors of a parameter's size the state has, after a step of the first group."""
        _, _, state = self.tried(0, torch.zeros(3, 3))
        return sum(1 for value in state.values() if isinstance(value, torch.Tensor) and value.shape == (3, 3))

    def tried(self, group: int, like: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]:
        """Make a step of zeros like `like`, as in `group`; return the optimizer, its parameter and the state made."""
        parameter = torch.zeros_like(like, requires_grad=like.is_floating_point())
        parameter.grad = torch.zeros_like(like)
        optimizer = self.make([[parameter] if index == group else [] for index in range(len(self.groups))])
        optimizer.step()
        return optimizer, parameter, dict(optimizer.state[parameter])


def recipe(optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, elementwise: bool | None = None) -> Recipe:
    """Return what makes `optimizer`, whose parameters are those of `model`, again over slices of them.

    optimizer
        Any of torch.optim but LBFGS and SparseAdam, or a class of your own, that has made no step. Made over the whole
        model before it is parallelized.
    elementwise
        Of a class of your own: whether each element is updated from its own values alone.

    Raises `ValueError` for an optimizer that cannot be made again, or that has parameters beside the model's.
    """
    kind = type(optimizer)
    known = getattr(torch.optim, kind.__name__, None) is kind
    if known and kind.__name__ in REFUSED:
        raise ValueError(f"{kind.__name__} cannot be divided: {REFUSED[kind.__name__]}; take Adam, for example")
    if known and kind.__name__ in ELEMENTWISE | OF_WHOLE_PARAMETERS:
        elementwise = kind.__name__ in ELEMENTWISE
    if elementwise is None:
        raise ValueError(
            f"{kind.__name__} is not known: give recipe(..., elementwise=True) if it updates each element from its own "
            "values alone, else elementwise=False"
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ValueError(f"this {kind.__name__} has made steps: give a new one, and load its state with load_pieces")
    names: dict[torch.Tensor, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    groups = tuple(_group(index, group, names) for index, group in enumerate(optimizer.param_groups))
    accepted = signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    found = Recipe(kind, groups, settings, elementwise)
    _check_makes(found, optimizer)
    return found


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


def _has_stepped(state: Mapping[str, Any]) -> bool:
    return float(state.get("step", 1)) > 0


def _check_makes(found: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a class that keeps settings where its groups do not have them: the one made again would differ."""
    made = found.make([[] for _ in found.groups])
    for name, value in vars(optimizer).items():
        plain, again = isinstance(value, (bool, int, float, str, tuple, type(None))), getattr(made, name, None)
        if name not in _OF_EVERY and plain and again != value:
            raise ValueError(
                f"{found.kind.__name__} made again has {name}={again!r} and not {value!r}: keep its settings in its "
                "defaults"
            )
