"""Matches the arguments of a call with the traced arguments, by the forward's signature; nothing is guessed."""

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
    """The arguments of a model's traced call.

    positional, keywords
        The number of positional arguments, and the names of the others.
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

        Raises `ValueError` for a call whose arguments differ from the traced arguments: more, fewer, nested
        differently, or a non-tensor with another value.
        """
        leaves, spec = pytree.tree_flatten(self._bound(args, kwargs))
        if spec != self.spec:
            raise ValueError(f"the arguments are {spec}; traced were {self.spec}")
        for leaf, traced in zip(leaves, self.leaves, strict=True):
            is_tensor = isinstance(leaf, torch.Tensor)
            if is_tensor != (traced is TENSOR) or not (is_tensor or leaf == traced):
                shown = TENSOR if is_tensor else repr(leaf)
                raise ValueError(
                    f"an argument is {shown}, but was {traced!r} when the model was traced: trace the model again"
                )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with the same arguments positional and named as in the traced call."""
        parameters = self.signature.parameters
        if any(parameter.kind in OPEN for parameter in parameters.values()):
            return tuple(args), {name: kwargs[name] for name in (*self.keywords, *kwargs) if name in kwargs}
        try:
            values = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ValueError(f"forward{self.signature}: {error}") from error
        positional = list(parameters)[: self.positional]
        for name in (*positional, *self.keywords):
            values.setdefault(name, parameters[name].default)
        others = set(values) - set(positional) - set(self.keywords)
        if any(values[name] is not parameters[name].default for name in others):
            raise ValueError(f"{', '.join(sorted(others))}: not given when the model was traced: trace the model again")
        return tuple(values[name] for name in positional), {name: values[name] for name in self.keywords}


def bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
    """Return the `Binding` of the call ``model(*args, **kwargs)``."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    traced = tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Binding(inspect.signature(model.forward), len(args), tuple(kwargs), spec, traced)
