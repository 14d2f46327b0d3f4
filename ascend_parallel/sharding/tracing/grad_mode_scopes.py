"""Scopes of a forward with their own grad mode or autocast: a traced graph has no scopes, only operators.

torch.export would put the operators of such a scope into a graph of their own. Here they stay among the others: where
the model has switched gradients off, their results are detached; a scope in which autocast is off changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

SET_GRAD_MODE: Callable[[bool], None] = torch._C._set_grad_enabled


def set_grad_mode(*args: Any) -> None:
    """Set the grad mode without a node of the tracer, from which torch.export would make a subgraph."""
    with torch._C.DisableTorchFunction():
        SET_GRAD_MODE(*args)


def without_gradient(function: Callable[..., Any], leaves: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call where gradients are off: an in-place function gets no gradient from the others."""
    if not getattr(function, "__name__", "").endswith("_"):
        return list(leaves)
    return [leaf.detach() if place and _has_gradient(leaf) else leaf for place, leaf in enumerate(leaves)]


def detached(returned: Any, leaves: Sequence[Any]) -> Any:
    """Detach a function's results as where gradients are off, except arguments that it returns themselves."""
    if not any(map(_has_gradient, leaves)):
        return returned
    own = {id(leaf) for leaf in leaves}
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor if id(tensor) in own or not _is_float(tensor) else tensor.detach(), returned
    )


@contextmanager
def autocast_switched_off() -> Iterator[None]:
    """Let the model switch autocast off inside the context, without a subgraph of torch.export.

    Raises `ValueError` where the model switches autocast on, or off again inside of another autocast.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def checked_enter(scope: torch.autocast) -> Any:
        if scope._enabled:
            raise ValueError(
                "autocast inside the forward, which a traced graph lacks: convert tensors by x.to(dtype), or give the "
                "dtype to the Strategy (amp)"
            )
        if torch.is_autocast_enabled(scope.device):
            raise ValueError("autocast is switched off inside of an autocast: trace without autocast around the model")
        with torch._C.DisableTorchFunction():
            return enter(scope)  # type: ignore[no-untyped-call]

    def plain_exit(scope: torch.autocast, *exception: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return leave(scope, *exception)

    torch.autocast.__enter__, torch.autocast.__exit__ = checked_enter, plain_exit  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


def _has_gradient(leaf: Any) -> bool:
    """Tell whether gradients can reach a tensor: also a parameter that is frozen now."""
    return isinstance(leaf, torch.Tensor) and (leaf.requires_grad or isinstance(leaf, torch.nn.Parameter))


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
