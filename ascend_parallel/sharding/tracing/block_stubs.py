"""Stubs for blocks that did the same as another: one operator for torch.export, expanded in our own graph.

The first block of a kind is traced. Each later block runs the operator `ascend_parallel_trace::block` on its parameters
and tensors, whose results are of the kinds of the first block's results. `Expansion` replaces such a node by the nodes
of the first block, with the names that tracing would have given, and so the recorded calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node as TracedNode
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor,
)
from torch.fx.graph import _Namespace
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import (
    CALL,
    CONSTANT,
    INPUT,
    Graph,
    Mark,
    Node,
    ParameterRef,
    Ref,
    UntracedTensor,
    Value,
    named_tensors,
)
from ascend_parallel.sharding.tracing.function_calls import RecordedCall, Recording, origin_of
from ascend_parallel.sharding.tracing.functionalize import BATCH_NORM
from ascend_parallel.sharding.tracing.same_blocks import ForwardNotes, blocks_of, replaced_forward, tensors_in

MADE, GIVEN = "made", "given"
ORIGINS = (ParameterRef, Ref, UntracedTensor)
DETACH = torch.ops.aten.detach.default
_RESULTS: ContextVar[Sequence[torch.Tensor]] = ContextVar("ascend_parallel_block_results")


class CannotExpandError(Exception):
    """The graph with stubs is not that of the model: trace without stubs."""


@torch.library.custom_op("ascend_parallel_trace::block", mutates_args=())
def _block(tensors: list[torch.Tensor], path: str) -> list[torch.Tensor]:
    raise AssertionError("a block's stub computes nothing")


@_block.register_fake
def _(tensors: list[torch.Tensor], path: str) -> list[torch.Tensor]:
    kinds = [(kind.shape, kind.stride(), kind.dtype, kind.device) for kind in _RESULTS.get()]
    return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in kinds]


BLOCK = torch.ops.ascend_parallel_trace.block.default


@dataclass(frozen=True)
class _Given:
    """A block's parameters, buffers and tensor arguments, the names of their nodes, and their recorded origins."""

    tensors: tuple[torch.Tensor, ...]
    nodes: tuple[str, ...]
    origins: tuple[Any, ...]

    @property
    def require_grad(self) -> tuple[bool, ...]:
        """Which tensors require gradients: operators on others get a `detach` where gradients are off."""
        return tuple(tensor.requires_grad for tensor in self.tensors)

    def maps_to(self, other: _Given) -> bool:
        """Tell whether equal nodes and origins here are equal in the other."""
        pairs = [*zip(self.nodes, other.nodes, strict=True), *zip(self.origins, other.origins, strict=True)]
        return len(set(pairs)) == len({mine for mine, _ in pairs})


@dataclass(frozen=True)
class _Body:
    """What the first block of a kind did.

    nodes, calls
        Where its nodes and recorded calls begin and end.
    results
        Its new results, as tensors, then the tensors given to it that are results of its nodes now: an operator may
        return its input (x.to).
    names
        The nodes of `results`.
    moved
        Which of the given tensors those are.
    leaves, spec
        What it returned: each leaf as MADE and its place in `results`, GIVEN and its place, or CONSTANT and its value.
    """

    path: str
    given: _Given
    nodes: range
    calls: range
    results: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    moved: tuple[int, ...]
    leaves: tuple[tuple[str, Any], ...]
    spec: pytree.TreeSpec


@dataclass(frozen=True)
class _Stub:
    """A block that did not run, its entry among the recorded calls."""

    path: str
    given: _Given
    body: _Body


@dataclass(frozen=True)
class _Traced:
    """A node of the tracer: its name, and the name that it asked for; of a stub's result the stub and an index."""

    name: str
    base: str
    stub: str = ""
    result: int = -1


class Stubs:
    """The stubs of one torch.export.

    same
        {path of a block: path of the first that did the same} in the run `noted`.
    """

    def __init__(self, same: Mapping[str, str], noted: ForwardNotes, recording: Recording) -> None:
        """Prepare stubs for a forward that `recording` records."""
        self._same, self._noted, self._recording = same, noted, recording
        self._notes = ForwardNotes(noted.kinds)
        self._bodies: dict[Any, _Body | None] = {}  # by the first block's path, and what requires gradients
        self._stubs: dict[str, _Stub] = {}  # by the name of the stub's node
        self._placeholders: dict[str, Any] = {}  # origins by the name of the tracer's node
        self._traced: list[_Traced] = []

    @contextmanager
    def stubbing(self, model: torch.nn.Module) -> Iterator[None]:
        """Let stubs run in place of repeated blocks inside the context."""
        blocks = blocks_of(model)
        with ExitStack() as stack:
            stack.enter_context(self._notes.noting_blocks(model))
            for path in self._same:
                stack.enter_context(replaced_forward(blocks[path], partial(self._run, path, blocks[path])))
            stack.enter_context(replaced_forward(model, partial(self._forward, model)))
            yield

    def _forward(self, model: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._bodies.clear()
        self._stubs.clear()
        with torch._C.DisableTorchFunction():
            tensors = (*named_tensors(model).values(), *tensors_in((args, kwargs)))
            nodes = {id(tensor): _node(tensor) for tensor in tensors}
            origins = self._recording.origins
            self._placeholders = {node.name: origins[key] for key, node in nodes.items() if node is not None}
        returned = self._notes.run(model, forward, *args, **kwargs)
        self._traced = list(map(self._named, _tracer().graph.nodes))
        return returned

    def _named(self, node: TracedNode) -> _Traced:
        if node.target is operator.getitem and (stub := node.all_input_nodes[0].name) in self._stubs:
            return _Traced(node.name, "", stub, int(node.args[1]))  # type: ignore[arg-type]
        return _Traced(node.name, _base(node))

    def _run(self, path: str, block: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the stub of a block; the block itself if it is the first, or no stub can stand for it."""
        nodes, calls = _tracer().graph.nodes, self._recording.calls
        with torch._C.DisableTorchFunction():
            given = self._given(block, (args, kwargs))
            if given is None:
                return forward(*args, **kwargs)
            key, begin = (self._same[path], given.require_grad), (len(nodes), len(calls))
            body = self._bodies.get(key)
            if body is not None and body.given.maps_to(given):
                returned = self._run_stub(_Stub(path, given, body))
                self._notes.skip(path, self._noted.kind_of(path), (args, kwargs), returned)
                return returned
        returned = forward(*args, **kwargs)
        if key not in self._bodies:
            with torch._C.DisableTorchFunction():
                ranges = range(begin[0], len(nodes)), range(begin[1], len(calls))
                self._bodies[key] = _body(path, given, *ranges, returned)
        return returned

    def _given(self, block: torch.nn.Module, arguments: Any) -> _Given | None:
        tensors = (*named_tensors(block).values(), *tensors_in(arguments))
        nodes = list(map(_node, tensors))
        names = tuple(node.name for node in nodes if node is not None)
        if len(names) < len(tensors):
            return None
        known = self._recording.origins
        origins = (origin_of(tensor, node, known) for tensor, node in zip(tensors, nodes, strict=True))
        return _Given(tensors, names, tuple(origins))

    def _run_stub(self, stub: _Stub) -> Any:
        """Add a stub's node to the tracer's graph and the recording; return what the block would return."""
        body, tracer = stub.body, _tracer()
        token = _RESULTS.set(body.results)
        try:
            with torch.no_grad():
                made = BLOCK(list(stub.given.tensors), stub.path)
        finally:
            _RESULTS.reset(token)
        nodes = list(map(_traced_node, made))
        self._stubs[nodes[0].all_input_nodes[0].name] = stub
        self._recording.calls.append(stub)
        with disable_proxy_modes_tracing(), torch.enable_grad():
            # no leaves for autograd, as results of operators are none
            made = [
                result.requires_grad_().clone() if kind.requires_grad else result
                for result, kind in zip(made, body.results, strict=True)
            ]
        tensors = [*made[: len(made) - len(body.moved)], *(stub.given.tensors[index] for index in body.moved)]
        for tensor, node in zip(tensors, nodes, strict=True):
            track_tensor(tensor, Proxy(node, tracer), constant=None, tracer=tracer)
        return pytree.tree_unflatten([_leaf(leaf, made, stub.given.tensors) for leaf in body.leaves], body.spec)

    def expanded(self, graph: Graph, values: Mapping[str, Any], names: Mapping[str, str]) -> Expansion:
        """Return the graph with the nodes of the first blocks in place of the stubs.

        values
            The graph's value of each of the tracer's nodes, by name.
        names
            The first name of each parameter and buffer.

        Raises `CannotExpandError` where the forward did otherwise than in the run that was noted.
        """
        if self._notes.kind != self._noted.kind:
            raise CannotExpandError
        placeholders = {node.source: Value(node.name) for node in graph.nodes.values() if node.kind != CALL}
        inputs = [Value(node.name) for node in graph.inputs]
        sources = {names.get(source, source): value for source, value in placeholders.items()}
        values = dict(values)
        for name, origin in self._placeholders.items():
            values[name] = inputs[origin.index] if isinstance(origin, Ref) else sources.get(origin.name)
        return Expansion(graph, values, self._stubs).of(self._traced, self._recording.calls)


class Expansion:
    """A graph without stubs.

    values
        Its value of each node, by the name that tracing would have given.
    """

    def __init__(self, graph: Graph, values: Mapping[str, Any], stubs: Mapping[str, _Stub]) -> None:
        """Prepare to expand `stubs`, by the names of their nodes, in a graph with `values`, by the tracer's names."""
        self._graph, self._old_values, self._stubs = graph, values, stubs
        self._space = _Namespace()
        self._nodes: dict[str, Node] = {}
        self._made: list[tuple[str, str]] = []  # names in order, each with the name that it asked for
        self._names: dict[str, str] = {}  # new names, by the tracer's
        self._copies: dict[str, dict[str, str]] = {}  # by a stub's path: {name in the first block: name of the copy}
        self._new: dict[Value, Value] = {}
        self.values: dict[str, Any] = {}

    def of(self, traced: Sequence[_Traced], calls: Sequence[Any]) -> Expansion:
        """Expand nodes and recorded calls; raise `CannotExpandError` where tracing would give another graph."""
        places: list[int] = []
        for each in traced:
            places.append(len(self._made))
            if each.stub:
                stub = self._stubs[each.stub]
                self._names[each.name] = self._copies[stub.path][self._names[stub.body.names[each.result]]]
            elif each.name in self._stubs:
                self._copy(each.name, self._stubs[each.name], places)
            else:
                self._keep(each)
        known = {each.name for each in traced}
        if any(node.kind == CALL and name not in known for name, node in self._graph.nodes.items()):
            raise CannotExpandError  # torch.export has added a node after the forward, or renamed one
        self.calls = self._expanded_calls(calls)
        self.graph = self._finished()
        return self

    def _named(self, base: str) -> str:
        name = self._space.create_name(base, None)
        if name in self._graph.nodes and self._graph.nodes[name].kind != CALL:
            raise CannotExpandError  # torch.export would rename the operator, as an input has its name
        self._made.append((base, name))
        return name

    def _keep(self, traced: _Traced) -> None:
        name = self._names[traced.name] = self._named(traced.base)
        if name != traced.name and not self._copies:
            raise CannotExpandError
        node = self._graph.nodes.get(traced.name)
        if node is not None and node.kind == CALL:
            self._nodes[name] = replace(node, name=name, inputs=tuple(map(self._value, node.inputs)))
            self._new |= dict(zip(node.values, self._nodes[name].values, strict=True))
        if traced.name in self._old_values:
            self.values[name] = pytree.tree_map_only(Value, self._value, self._old_values[traced.name])

    def _value(self, value: Value) -> Value:
        """Return the new value of a value in the graph with stubs."""
        if value.node in self._stubs and value not in self._new:
            raise CannotExpandError  # a result that nothing reads in the first block
        return self._new.get(value, value)

    def _copy(self, name: str, stub: _Stub, places: Sequence[int]) -> None:
        """Add the nodes of a stub's first block with the stub's own tensors."""
        body, first = stub.body, stub.body.path
        copies = self._copies[stub.path] = {}
        for base, old in self._made[places[body.nodes.start] : places[body.nodes.stop]]:
            copies[old] = self._named(base)
        given = self._given(stub)
        marks: dict[Mark, Mark] = {}

        def moved(value: Value) -> Value:
            if value.node not in copies and value not in given:
                raise CannotExpandError  # a tensor from outside of the first block
            return Value(copies[value.node], value.index) if value.node in copies else given[value]

        if self._graph.nodes[name].module != stub.path:
            raise CannotExpandError

        for old, new in copies.items():
            node = self._nodes.get(old)
            if node is not None:
                if not f"{node.module}.".startswith(f"{first}."):
                    raise CannotExpandError
                mark = None if node.mark is None else marks.setdefault(node.mark, replace(node.mark))
                module, inputs = stub.path + node.module.removeprefix(first), tuple(map(moved, node.inputs))
                self._nodes[new] = replace(node, name=new, inputs=inputs, module=module, mark=mark)
            if old in self.values:
                self.values[new] = pytree.tree_map_only(Value, moved, self.values[old])
        for index, result in enumerate(body.names):
            copy = copies[self._names[result]]
            if copy in self.values:
                self._new[Value(name, index)] = self.values[copy]

    def _given(self, stub: _Stub) -> dict[Value, Value]:
        pairs = zip(stub.body.given.nodes, stub.given.nodes, strict=True)
        values = [[self._old_values.get(name) for name in pair] for pair in pairs]
        return {
            self._value(mine): self._value(other) for mine, other in values if mine is not None and other is not None
        }

    def _expanded_calls(self, calls: Sequence[RecordedCall | _Stub]) -> list[RecordedCall]:
        places: list[int] = []
        expanded: list[RecordedCall] = []
        for call in calls:
            places.append(len(expanded))
            if isinstance(call, _Stub):
                begin, end = places[call.body.calls.start], places[call.body.calls.stop]
                moved = self._origin_in(call)
                expanded += [_with_origins(copied, moved) for copied in expanded[begin:end]]
            else:
                expanded.append(_with_origins(call, self._origin))
        return expanded

    def _origin(self, origin: Any) -> Any:
        if isinstance(origin, UntracedTensor):
            return UntracedTensor(self._names.get(origin.name, origin.name))
        return origin

    def _origin_in(self, stub: _Stub) -> Callable[[Any], Any]:
        pairs = zip(stub.body.given.origins, stub.given.origins, strict=True)
        given, copies = {self._origin(mine): self._origin(other) for mine, other in pairs}, self._copies[stub.path]

        def moved(origin: Any) -> Any:
            if isinstance(origin, UntracedTensor) and origin.name in copies:
                return UntracedTensor(copies[origin.name])
            return given[origin]

        return moved

    def _finished(self) -> Graph:
        """Return the graph without what torch.export removes: parameters that nothing reads, and dead detaches."""
        outputs = pytree.tree_map_only(Value, self._value, self._graph.outputs)
        updates = {name: self._value(value) for name, value in self._graph.updates.items()}
        held = {name: node for name, node in self._graph.nodes.items() if node.kind != CALL}
        graph = replace(self._graph, nodes=held | self._nodes, outputs=outputs, updates=updates)
        read, nodes = {value.node for value in graph.kept}, dict(graph.nodes)
        for name, node in reversed(list(graph.nodes.items())):
            is_call = node.call is not None
            removable = node.call.target is DETACH if node.call is not None else node.kind != INPUT
            if removable and name not in read:
                del nodes[name]
            elif is_call:
                read |= {value.node for value in node.inputs}
        return replace(graph, nodes=nodes)


def _with_origins(call: RecordedCall, moved: Callable[[Any], Any]) -> RecordedCall:
    """Return a recorded call with other origins."""
    arguments, results = (
        [moved(leaf) if isinstance(leaf, ORIGINS) else leaf for leaf in leaves]
        for leaves in (call.arguments, call.results)
    )
    given = {place: moved(origin) for place, origin in call.moved.items()}
    return replace(call, arguments=arguments, results=results, moved=given, kept=list(map(moved, call.kept)))


def _body(path: str, given: _Given, nodes: range, calls: range, returned: Any) -> _Body | None:
    """Return the recorded body of a block; None if stubs cannot stand for such blocks."""
    own = {node.name: node for node in list(islice(reversed(_tracer().graph.nodes), len(nodes)))[::-1]}
    if not all(_is_copyable(node, own, given.nodes) for node in own.values()):
        return None
    indices = {id(tensor): index for index, tensor in enumerate(given.tensors)}
    leaves, spec = pytree.tree_flatten(returned)
    results = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in indices}
    after = list(map(_node, given.tensors))
    moved = [index for index, node in enumerate(after) if node is None or node.name != given.nodes[index]]
    tensors = (*results.values(), *(given.tensors[index] for index in moved))
    names = tuple(node.name for tensor in tensors if (node := _node(tensor)) is not None and node.name in own)
    if not results or len(names) < len(tensors) or not all(map(_is_dense, results.values())):
        return None
    places = {key: place for place, key in enumerate(results)}
    kinds = [
        (MADE, places[id(leaf)])
        if id(leaf) in results
        else (GIVEN, indices[id(leaf)])
        if isinstance(leaf, torch.Tensor)
        else (CONSTANT, leaf)
        for leaf in leaves
    ]
    return _Body(path, given, nodes, calls, tensors, names, tuple(moved), tuple(kinds), spec)


def _is_copyable(node: TracedNode, own: Mapping[str, TracedNode], given: Sequence[str]) -> bool:
    """Tell whether a block's node is an operator on the block's own tensors, which writes to none that was given."""
    if not {read.name for read in node.all_input_nodes} <= own.keys() | set(given):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    if node.target is BATCH_NORM:
        return not node.args[5]  # it updates the running statistics
    declared = zip(node.target._schema.arguments, node.args, strict=False)
    written = [value for arg, value in declared if arg.alias_info is not None and arg.alias_info.is_write]
    if node.target._schema.is_mutable and not written:
        return False
    return all(isinstance(value, TracedNode) and value.name in own for value in written)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a stub can return a tensor of this kind: `clone` keeps its strides."""
    with disable_proxy_modes_tracing():
        return type(tensor) is FakeTensor and tensor.detach().clone().stride() == tensor.stride()


def _leaf(leaf: tuple[str, Any], made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Any:
    kind, what = leaf
    return {MADE: made, GIVEN: given}[kind][what] if kind != CONSTANT else what


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def _node(tensor: torch.Tensor) -> TracedNode | None:
    """Return the tracer's node of a tensor; None for a tensor without one, or whose value is known."""
    slot = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def _traced_node(tensor: torch.Tensor) -> TracedNode:
    node = _node(tensor)
    assert node is not None
    return node


def _base(node: TracedNode) -> str:
    """Return the name that the tracer asked for."""
    if node.op != "call_function":
        return node.name
    target = node.target.overloadpacket if isinstance(node.target, torch._ops.OpOverload) else node.target
    return str(node.graph._target_to_str(target.__name__ if hasattr(target, "__name__") else target))
