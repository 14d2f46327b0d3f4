"""The arguments of a call matched with those that were traced, by the forward's signature; nothing is guessed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

TENSOR = "a tensor"
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Binding:
    """How a model was called when it was traced.

    leaves
        All arguments without their nesting; `TENSOR` for tensors.
    """

    signature: inspect.Signature
    positional: int
    keywords: tuple[str, ...]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call in the order in which they were traced.

        Raises `ValueError` for a call with other arguments than the traced one: more, fewer, nested otherwise, or
        another value of what is no tensor.
        """
        leaves, spec = pytree.tree_flatten(self._arranged(args, kwargs))
        if spec != self.spec:
            raise ValueError(f"the arguments are {spec}; traced were {self.spec}")
        for found, traced in zip(leaves, self.leaves, strict=True):
            is_tensor = isinstance(found, torch.Tensor)
            if is_tensor != (traced is TENSOR) or not (is_tensor or found == traced):
                shown = TENSOR if is_tensor else repr(found)
                raise ValueError(
                    f"an argument is {shown}, which was {traced!r} when the model was traced: trace it again"
                )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _arranged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments given by place and by name as the traced ones were."""
        parameters = self.signature.parameters
        if any(one.kind in OPEN for one in parameters.values()):
            return tuple(args), {name: kwargs[name] for name in (*self.keywords, *kwargs) if name in kwargs}
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ValueError(f"forward{self.signature}: {error}") from error
        by_place = list(parameters)[: self.positional]
        for name in (*by_place, *self.keywords):
            given.setdefault(name, parameters[name].default)
        others = set(given) - set(by_place) - set(self.keywords)
        if any(given[name] is not parameters[name].default for name in others):
            raise ValueError(f"{', '.join(sorted(others))}: not given when the model was traced: trace it again")
        return tuple(given[name] for name in by_place), {name: given[name] for name in self.keywords}


def bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
    """Return how ``model(*args, **kwargs)`` is called."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    kept = tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Binding(inspect.signature(model.forward), len(args), tuple(kwargs), spec, kept)
