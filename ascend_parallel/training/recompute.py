"""Recompute modules and single functions: forward's tensors are not kept for backward but computed again.

On a plain module `recompute` runs its forward under torch.utils.checkpoint, and sets a mark. A planned model reads the
mark and recomputes operators instead, by the same patterns (sharding/runtime/checkpointed_blocks.py), also where their
collectives overlap.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, path_matches
from ascend_parallel.sharding.rules import draws
from ascend_parallel.sharding.runtime.recompute_config import MARK, Recompute, check_recompute

__all__ = ["Recomputable", "Recompute", "check_recompute", "recompute"]

Module = TypeVar("Module", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])
INSIDE = "_ascend_parallel_inside"


@overload
def recompute(target: Module, on: bool = True, *, keep: Sequence[str] = (), collectives: str = "keep") -> Module: ...
@overload
def recompute(
    target: Function, on: bool = True, *, keep: Sequence[str] = (), collectives: str = "keep"
) -> Function: ...
def recompute(target: Any, on: bool = True, *, keep: Sequence[str] = (), collectives: str = "keep") -> Any:
    """Make backward recompute a module's forward, or a function; return the module, or a new function.

    target
        A module, which is changed, or a function of tensors, such as torch.nn.functional.silu.
    on
        False removes the mark from a module.
    keep
        Exceptions, relative to the module, whose results are kept. "mlp.down" is a module without submodules,
        "attention:*scaled_dot_product*" operators that run in a module (":...": in the target itself) by torch's names
        (without "aten."; in a planned model by the plan's names).
    collectives
        In a planned model: "keep" the results of collectives, or "recompute" them. A plain module's own ones run again.

    Outside of a plan the second run has the random numbers and autocast of the first; everything else that it reads
    must be unchanged: do not update statistics in it (batch norm counts a batch twice; in a planned model once).
    Raises `StrategyError` for an exception that matches nothing, for operators when the module first runs; `ValueError`
    for a module whose forward was replaced on the instance.
    """
    if not isinstance(target, nn.Module):
        if keep or not on:
            raise ValueError("keep and on=False are for modules; a function is recomputed wholly, or left as it is")
        return _recomputed(target)
    if MARK not in vars(target) and "forward" in vars(target):
        raise ValueError(f"forward of {type(target).__name__} was replaced on the instance: mark a module around it")
    mark = Recompute(modules=("",), keep=keep, collectives=collectives)
    inside = _KeptInside(target, mark.keep)
    _unmark(target)
    if on:
        setattr(target, MARK, mark)
        setattr(target, INSIDE, inside)
        inside.watch()
        target.forward = types.MethodType(_checkpointed(type(target).forward), target)
    return target


class Recomputable(nn.Module):
    """A module with the published method: ``class Layer(Recomputable)``, then ``layer.recompute()``."""

    def recompute(self, on: bool = True, *, keep: Sequence[str] = (), collectives: str = "keep") -> None:
        """Make backward recompute forward; as the function `recompute`."""
        recompute(self, on, keep=keep, collectives=collectives)


def _recomputed(function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    return run  # type: ignore[return-value]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = types.MethodType(forward, self)
        if torch.compiler.is_exporting() or not torch.is_grad_enabled():
            return bound(*args, **kwargs)  # a traced graph has marks, and no checkpoints
        inside: _KeptInside = vars(self)[INSIDE]
        contexts = inside.contexts if inside.keep else noop_context_fn
        result = checkpoint(bound, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        inside.check()
        return result

    return run


def _unmark(module: nn.Module) -> None:
    if MARK in vars(module):
        vars(module)[INSIDE].remove()
        for name in (MARK, INSIDE, "forward"):
            delattr(module, name)


class _KeptInside:
    """Tracks which submodule of a marked module runs, for its exceptions."""

    def __init__(self, module: nn.Module, keep: Sequence[str]) -> None:
        self._name = type(module).__name__
        self.keep = [(path, operator) for path, _, operator in (pattern.partition(":") for pattern in keep)]
        self._unseen = {f"{path}:{operator}" for path, operator in self.keep if operator}
        self._running = [""]
        paths = self._paths = dict(module.named_modules())
        self._hooks: list[Any] = []
        for path, operator in self.keep:
            matches = [name for name in paths if path_matches(name, path)]
            parents = [name for name in matches if not operator and any(paths[name].children())]
            if not matches or (not path and not operator):
                raise StrategyError(f"keep: {path!r} names no module of {self._name}; there are {', '.join(paths)}")
            if parents:
                raise StrategyError(f"keep: {parents[0]!r} has modules of its own: name those, or operators")

    def watch(self) -> None:
        """Track the running submodule, if there are exceptions."""
        paths = self._paths if self.keep else {}
        self._hooks = [hook for path, module in paths.items() if path for hook in self._watch(path, module)]

    def contexts(self) -> Any:
        """Return the contexts of the first and the second run."""
        return create_selective_checkpoint_contexts(self._policy)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise if an exception has matched no operator in a complete run."""
        if self._unseen:
            raise StrategyError(f"keep: {', '.join(sorted(self._unseen))} names no operator that {self._name} runs")

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, path: str, module: nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._running.append(path)

        def leave(*_: Any) -> None:
            self._running.pop()

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def _policy(self, _context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().split("::")[1].split(".")[0]
        kept = [pair for pair in self.keep if path_matches(self._running[-1], pair[0])]
        kept = [(path, pattern) for path, pattern in kept if not pattern or fnmatchcase(name, pattern)]
        self._unseen -= {f"{path}:{pattern}" for path, pattern in kept}
        if kept and draws(OpCall(operator, args, kwargs, (), ())):
            raise StrategyError(
                f"keep: {self._running[-1]!r} runs {name}, which draws random numbers, and can only run again (with "
                "the same ones)"
            )
        if not kept or any(returned.alias_info is not None for returned in operator._schema.returns):
            return CheckpointPolicy.PREFER_RECOMPUTE  # a kept view would keep its base
        return CheckpointPolicy.MUST_SAVE
