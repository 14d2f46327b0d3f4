"""Records a forward's calls of torch's functions. An eager run is compared with these calls, call by call.

A graph has operators; a forward calls functions, and each function runs some operators. `Recording` records the calls
while a model is traced. A later forward with the same calls and arguments is the forward of that graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import (
    BUFFER,
    CALL,
    INPUT,
    FunctionCall,
    Graph,
    Node,
    ParameterRef,
    Ref,
    UntracedTensor,
    Value,
    first_names,
    named_tensors,
)
from ascend_parallel.sharding.tracing.functionalize import is_in_place, updates_statistics
from ascend_parallel.sharding.tracing.grad_mode_scopes import (
    SET_GRAD_MODE,
    autocast_switched_off,
    detached,
    set_grad_mode,
    without_gradient,
)
from ascend_parallel.sharding.tracing.model_files import calling_line
from ascend_parallel.sharding.tracing.same_blocks import replaced_forward, tensors_in

_PROPERTIES = """shape ndim dtype device layout requires_grad is_leaf grad_fn itemsize nbytes is_cpu is_cuda is_meta
    is_sparse is_quantized is_nested is_mkldnn"""
_METHODS = """size dim ndimension numel nelement element_size stride is_contiguous get_device is_floating_point
    is_complex is_signed is_inference __len__ __hash__"""
# Functions that read a tensor's metadata and none of its elements.
METADATA_FUNCTIONS = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    )
)
# torch.library makes an autograd.Function of this name from the backward that register_autograd gave an operator.
OF_CUSTOM_OPERATOR = "GeneratedBackwardFor_"


@dataclass(frozen=True)
class RecordedCall:
    """A call of a torch function; see `FunctionCall`. In place of tensors are their origins."""

    function: Callable[..., Any]
    arguments: list[Any]
    arguments_spec: pytree.TreeSpec
    results: list[Any]
    results_spec: pytree.TreeSpec
    changed: dict[int, int]
    moved: dict[int, Any]
    kept: list[Any]  # what parameters and buffers among the arguments are now: w.flatten(1) may return w itself
    nodes: list[str]  # the names of the tracer's nodes, if one of them writes to a tensor
    line: str


@dataclass
class Recording:
    """Records the calls of a model's forward inside `noting`.

    calls
        The calls in order, with origins in place of tensors: a `ParameterRef`, a `Ref` to a tensor among the forward's
        arguments, or an `UntracedTensor` with the name of the tracer's node. `Stubs` adds entries of its own, and
        expands them.
    origins
        The origins of the parameters, buffers and arguments of the forward, by id.
    refused
        The reason why an eager run cannot follow the calls; "": it can.
    """

    calls: list[Any] = field(default_factory=list)
    origins: dict[int, Any] = field(default_factory=dict)
    refused: str = ""

    @contextmanager
    def noting(self, model: torch.nn.Module) -> Iterator[None]:
        """Record the calls of the model's forward inside the context; of several forwards those of the last."""
        first = first_names(model)

        def record(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.calls.clear()
            self.refused = ""
            named = named_tensors(model, all_names=True).items()
            origins = self.origins = {id(tensor): ParameterRef(first[name]) for name, tensor in named}
            origins |= {id(tensor): Ref(place) for place, tensor in enumerate(tensors_in((args, kwargs)))}
            with autocast_switched_off(), _CallRecorder(self, origins):
                returned = forward(*args, **kwargs)
            for leaf in pytree.tree_leaves(returned):
                _check_gradient(leaf)
            return returned

        with replaced_forward(model, record):
            yield

    def refuse(self, reason: str) -> None:
        """Keep the first reason why an eager run cannot follow the calls."""
        self.refused = self.refused or reason


class _CallRecorder(TorchFunctionMode):
    """Adds the calls of a forward to a recording."""

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
        if function is SET_GRAD_MODE:
            return set_grad_mode(*args)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        arguments, latest = [self._origin(leaf) for leaf in leaves], _latest_node()
        held = [leaf for leaf, origin in zip(leaves, arguments, strict=True) if isinstance(origin, ParameterRef)]
        before = list(map(_node_of, held))
        if torch.is_grad_enabled():
            returned = function(*args, **(kwargs or {}))
        else:
            args, kwargs = pytree.tree_unflatten(without_gradient(function, leaves), spec)
            returned = detached(function(*args, **(kwargs or {})), leaves)
        written = {
            id(leaf): place
            for place, (leaf, origin) in enumerate(zip(leaves, arguments, strict=True))
            if isinstance(leaf, torch.Tensor) and not isinstance(origin, ParameterRef) and self._origin(leaf) != origin
        }
        results, results_spec = pytree.tree_flatten(returned)
        changed = {place: written.pop(id(result)) for place, result in enumerate(results) if id(result) in written}
        traced = list(_nodes_after(latest))[::-1]
        nodes = (
            [node.name for node in traced]
            if any(is_in_place(node) or updates_statistics(node) for node in traced)
            else []
        )
        if nodes or written or any(isinstance(result, torch.Tensor) for result in results):
            origins = [self._origin(result) for result in results]
            moved = {place: self._origin(leaves[place]) for place in written.values()}
            after = zip(map(_node_of, held), before, strict=True)
            kept = [UntracedTensor(node.name) for node, old in after if node is not None and node is not old]
            line = calling_line()
            self._recording.calls.append(
                RecordedCall(function, arguments, spec, origins, results_spec, changed, moved, kept, nodes, line)
            )
        return returned

    def _origin(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = _node_of(leaf)
        if (origin := origin_of(leaf, node, self._origins)) is not None and not isinstance(origin, UntracedTensor):
            return origin
        _check_gradient(leaf)
        if torch._C._functorch.is_batchedtensor(leaf):
            self._recording.refuse(
                f"{calling_line()} runs torch.vmap, whose functions do not see their tensors: write them out for all"
            )
            return None
        if origin is None:
            self._recording.refuse(
                f"{calling_line()} reads a tensor of shape {list(leaf.shape)} that is no parameter, buffer or input: "
                "register it as a buffer"
            )
        return origin


def origin_of(tensor: torch.Tensor, node: torch.fx.Node | None, origins: Mapping[int, Any]) -> Any:
    """Return a tensor's origin; None if it is unknown.

    node
        The tracer's node that is the tensor at present. An argument of the forward may have become another node:
        ``x.to(x.device)`` returns x, and so does a function that gives its arguments one shape.
    origins
        The origins of the parameters, buffers and arguments of the forward, by id.
    """
    known = origins.get(id(tensor))
    if node is not None and (known is None or (isinstance(known, Ref) and node.op != "placeholder")):
        return UntracedTensor(node.name)
    return known


def _check_gradient(leaf: Any) -> None:
    """Raise `ValueError` for an autograd.Function, whose backward a graph of operators would lack."""
    if isinstance(leaf, torch.Tensor) and isinstance(leaf.grad_fn, BackwardCFunction):
        name = type(leaf.grad_fn).__name__.removesuffix("Backward")
        if name.startswith(OF_CUSTOM_OPERATOR):
            return
        raise ValueError(
            f"the autograd.Function {name} has a backward of its own, which a traced graph lacks: make it an operator "
            "by torch.library.custom_op and register_autograd, or remove it (or the backward hook)"
        )


def _node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    node: torch.fx.Node | None = None if slot is None else slot.proxy.node
    return node


def _latest_node() -> torch.fx.Node | None:
    mode = get_proxy_mode()
    # With torch 2.11 what `reversed` returns can be iterated, and is no iterator itself.
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def _nodes_after(node: torch.fx.Node | None) -> Iterator[torch.fx.Node]:
    """Yield the nodes that were traced after a node, the last one first."""
    mode = get_proxy_mode()
    if mode is not None:
        yield from takewhile(lambda each: each is not node, reversed(mode.tracer.graph.nodes))


def calls_of(
    recording: Recording, graph: Graph, values: Mapping[str, Any], rewritten: Mapping[str, Mapping[str, Value]]
) -> tuple[FunctionCall, ...] | str:
    """Return the recorded calls with the graph's values and nodes, or the reason why they cannot be followed.

    values
        The graph's value of each of the tracer's nodes, by name.
    rewritten
        {name of an operator that writes: the other nodes that it changed, by name, with their new values}.
    """
    if recording.refused:
        return recording.refused
    inputs = [Value(node.name) for node in graph.inputs]
    now = dict(values)

    def in_graph(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return inputs[leaf.index]
        return now.get(leaf.name, leaf) if isinstance(leaf, UntracedTensor) else leaf

    calls: list[FunctionCall] = []
    rest = graph.of_kind(CALL)
    places = {node.name: place for place, node in enumerate(rest)}
    stored = set[Value]()
    done = 0
    for count, entry in enumerate(recording.calls, start=1):
        args, outputs = tuple(map(in_graph, entry.arguments)), tuple(map(in_graph, entry.results))
        after = ((args[place], in_graph(origin)) for place, origin in entry.moved.items())
        moved = {old: new for old, new in after if isinstance(old, Value) and isinstance(new, Value)}
        kept = [value for value in map(in_graph, entry.kept) if isinstance(value, Value)]
        for owner, new in (pair for name in entry.nodes for pair in rewritten.get(name, {}).items()):
            if _is_held(values[owner], graph):
                kept.append(new)
            else:
                moved[now[owner]] = new
            now[owner] = new
        made = [value.node for value in (*outputs, *moved.values(), *kept) if isinstance(value, Value)]
        if any(name in rewritten for name in entry.nodes):  # autograd makes the written views again, for nobody
            made += entry.nodes
        last = max((places.get(name, -1) for name in made), default=-1)
        end = len(rest) if count == len(recording.calls) else max(done, last + 1)
        nodes = tuple(rest[done:end])
        specs = (entry.arguments_spec, entry.results_spec)
        given = {value for value in (*args, *moved, *stored) if isinstance(value, Value)}
        if any(name in rewritten for name in entry.nodes) or _missing(nodes, given, graph):
            # autograd makes written views again, for nobody, in whichever call comes next
            nodes = _read_or_made(nodes, {*outputs, *moved.values(), *kept}, graph)
        if missing := _missing(nodes, given, graph):
            return (
                f"{entry.line} calls {name_of(entry.function)}, which works on {missing}, a tensor that is not "
                "among its arguments (an alias of one?)"
            )
        read = tuple(stored.intersection(value for node in nodes for value in node.inputs))
        call = FunctionCall(
            entry.function, args, specs[0], outputs, specs[1], entry.changed, nodes, moved, tuple(kept), read
        )
        stored.update(kept)
        calls.append(call)
        done = end
    return tuple(calls)


def _is_held(value: Value, graph: Graph) -> bool:
    """Tell whether a value is that of a buffer before a write; the graph lacks a buffer that is only written."""
    return value.node not in graph.nodes or graph.nodes[value.node].kind == BUFFER


def _read_or_made(nodes: Sequence[Node], made: Set[Any], graph: Graph) -> tuple[Node, ...]:
    """Return the nodes of a call whose tensors are read, or are among its results (`made`)."""
    others = graph.nodes.keys() - {node.name for node in nodes}
    read = {*made, *graph.kept, *(value for name in others for value in graph.nodes[name].inputs)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if read.intersection(node.values):
            kept.append(node)
            read.update(node.inputs)
    return tuple(reversed(kept))


def _missing(nodes: Sequence[Node], given: Set[Value], graph: Graph) -> str:
    """Return a tensor that a call's nodes read, but that is neither given to the call nor made by it; "" if none."""
    available = set(given)
    for node in nodes:
        for value in node.inputs:
            if value not in available and graph.nodes[value.node].kind in (CALL, INPUT):
                return value.node
        available |= set(node.values)
    return ""


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages, such as torch.Tensor.add."""
    return str(resolve_name(function) or getattr(function, "__qualname__", repr(function)))
