"""The calls of torch's functions that a forward makes: what an eager run is held against, call by call.

A graph has operators; a forward calls functions, each of which runs some. While a model is traced `Recording` notes
which: a forward that later makes the same calls with the same arguments is the forward of that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, INPUT, FunctionCall, Graph, ParameterRef, UntracedTensor, Value


@dataclass(frozen=True)
class _Input:
    place: int


@dataclass(frozen=True)
class _Made:
    """A tensor made by a node of the tracer."""

    node: str


_Noted = tuple[Callable[..., Any], list[Any], pytree.TreeSpec, list[Any], pytree.TreeSpec, dict[int, int]]


@dataclass
class Recording:
    """Notes the calls of a model's forward while `noting` it.

    calls
        As they came, tensors by their origin.
    refused
        Why the calls cannot be followed; "": they can.
    """

    calls: list[_Noted] = field(default_factory=list)
    refused: str = ""

    @contextmanager
    def noting(self, model: torch.nn.Module) -> Iterator[None]:
        """Note the calls of the forwards inside; of several those of the last."""
        forward, own = model.forward, "forward" in vars(model)
        first = first_names(model)

        @wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.clear()
            self.refused = ""
            held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            origins: dict[int, Any] = {id(tensor): ParameterRef(first[name]) for name, tensor in held}
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            origins |= {id(tensor): _Input(place) for place, tensor in enumerate(tensors)}
            with _Noting(self, origins):
                returned = forward(*args, **kwargs)
            for leaf in pytree.tree_leaves(returned):
                _check_gradient(leaf)
            return returned

        model.forward = noted
        try:
            yield
        finally:
            model.forward = forward
            if not own:
                del model.forward

    def refuse(self, why: str) -> None:
        """Keep the first reason why the calls cannot be followed."""
        self.refused = self.refused or why


class _Noting(TorchFunctionMode):
    """Around one forward."""

    def __init__(self, recording: Recording, origins: Mapping[int, Any]) -> None:
        super().__init__()
        self._recording, self._origins = recording, origins

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        arguments = [self._origin(leaf) for leaf in leaves]
        given = function(*args, **(kwargs or {}))
        written = {
            id(leaf): place
            for place, (leaf, origin) in enumerate(zip(leaves, arguments, strict=True))
            if isinstance(leaf, torch.Tensor) and not isinstance(origin, ParameterRef) and self._origin(leaf) != origin
        }
        results, results_spec = pytree.tree_flatten(given)
        changed = {place: written.pop(id(one)) for place, one in enumerate(results) if id(one) in written}
        if written:
            self._recording.refuse(
                f"{name_of(function)} writes to an argument, or hands it on as another tensor (as mse_loss and l1_loss "
                "do): write it out of place, or as what it computes"
            )
        if any(isinstance(one, torch.Tensor) for one in results):
            made = [self._origin(one) for one in results]
            self._recording.calls.append((function, arguments, spec, made, results_spec, changed))
        return given

    def _origin(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self._origins:
            return self._origins[id(leaf)]
        _check_gradient(leaf)
        made = _node_of(leaf)
        if made is None:
            self._recording.refuse("a tensor that is no parameter, buffer or input is read: register it as a buffer")
            return None
        return _Made(made)


def _check_gradient(leaf: Any) -> None:
    """Refuse a gradient that a graph of operators would not have."""
    if isinstance(leaf, torch.Tensor) and isinstance(leaf.grad_fn, BackwardCFunction):
        name = type(leaf.grad_fn).__name__.removesuffix("Backward")
        raise ValueError(
            f"the autograd.Function {name} has a backward of its own, which a traced graph lacks: make it an operator "
            "by torch.library.custom_op and register_autograd, or take it (or the backward hook) away"
        )


def _node_of(tensor: torch.Tensor) -> str | None:
    """Return the name of the tracer's node that made a tensor."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    return None if slot is None else str(slot.proxy.node.name)


def calls_of(recording: Recording, graph: Graph, values: Mapping[str, Any]) -> tuple[FunctionCall, ...] | str:
    """Return the calls in words of the graph, or why they cannot be followed.

    values
        The graph's value of each of the tracer's nodes, by name.
    """
    if recording.refused:
        return recording.refused
    inputs = [Value(node.name) for node in graph.nodes.values() if node.kind == INPUT]

    def told(leaf: Any) -> Any:
        if isinstance(leaf, _Input):
            return inputs[leaf.place]
        return values.get(leaf.node, UntracedTensor(leaf.node)) if isinstance(leaf, _Made) else leaf

    found: list[FunctionCall] = []
    rest = [node for node in graph.nodes.values() if node.kind == CALL]
    places = {node.name: place for place, node in enumerate(rest)}
    done = 0
    for count, (function, arguments, spec, results, results_spec, changed) in enumerate(recording.calls, start=1):
        given, made = tuple(map(told, arguments)), tuple(map(told, results))
        last = max((places.get(one.node, -1) for one in made if isinstance(one, Value)), default=-1)
        end = len(rest) if count == len(recording.calls) else max(done, last + 1)
        call = FunctionCall(function, given, spec, made, results_spec, changed, tuple(rest[done:end]))
        if missing := _missing(call, graph):
            return f"{name_of(function)} works on {missing}, which is not among its arguments (an alias of one?)"
        found, done = [*found, call], end
    return tuple(found)


def _missing(call: FunctionCall, graph: Graph) -> str:
    """Return what the operators read that is neither given to the call, nor made by it, nor held."""
    there = {one for one in call.arguments if isinstance(one, Value)}
    for node in call.nodes:
        for value in node.inputs:
            if value not in there and graph.nodes[value.node].kind in (CALL, INPUT):
                return value.node
        there |= {Value(node.name, index) for index in range(len(node.outputs))}
    return ""


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter or buffer, the first of the names of that tensor."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for users, such as torch.Tensor.add."""
    return str(resolve_name(function) or getattr(function, "__qualname__", repr(function)))
