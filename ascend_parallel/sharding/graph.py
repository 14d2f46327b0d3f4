"""A model's forward as a list of operators. The planner chooses a strategy for each, and each rank runs its part."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.layout import Layout, Shape, cuts

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


def named_tensors(module: torch.nn.Module, *, all_names: bool = False) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name; a tied one by the first of its names, or by all."""
    named = (module.named_parameters, module.named_buffers)
    return {name: tensor for own in named for name, tensor in own(remove_duplicate=not all_names)}


def in_place_of(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new`, as a parameter if the tensor that it replaces is one."""
    return torch.nn.Parameter(new, held.requires_grad) if isinstance(held, torch.nn.Parameter) else new


def first_names(model: torch.nn.Module) -> dict[str, str]:
    """Return {name: first name of the same tensor} for all names of parameters and buffers."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(model, all_names=True).items()}


def tied_names(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by each name of a tied parameter or buffer, its other names."""
    names: dict[str, list[str]] = {}
    for name, first in first_names(model).items():
        names.setdefault(first, []).append(name)
    several = [tied for tied in names.values() if len(tied) > 1]
    return {name: tuple(other for other in tied if other != name) for tied in several for name in tied}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running inside the context: it would visit every node made so far, many times."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


INPUT, PARAMETER, BUFFER, CONSTANT, CALL = "input", "parameter", "buffer", "constant", "call"


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a whole tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def local_bytes(self, layout: Layout, mesh_shape: Sequence[int]) -> float:
        """Return the bytes of a rank's part in an even layout."""
        return self.nbytes / prod(cuts(layout, mesh_shape, len(self.shape)))


@dataclass(frozen=True)
class Ref:
    """A placeholder in a call's arguments for the node's `index`-th tensor input."""

    index: int


@dataclass(frozen=True)
class Value:
    """A tensor: the `index`-th output of the node named `node`."""

    node: str
    index: int = 0

    def __hash__(self) -> int:
        """Hash the node's name, which Python does once; nodes with several outputs are few."""
        return hash(self.node)


@dataclass(frozen=True)
class SharedSequence:
    """How ranks share the sequence of an attention: by an exchange inside of the operator.

    exchange
        "heads" or "gather" (ops/key_gather.py); "": a search takes what takes least time.
    groups
        In how many groups of heads; 0: a search takes what takes least time.
    repeats
        How often the graph has repeated each head of keys and values before: only the first of each is sent.
    reason
        Why a search took this way.
    """

    exchange: str = ""
    groups: int = 0
    repeats: int = 1
    reason: str = ""


@dataclass(frozen=True)
class OpCall:
    """An operator and its arguments, tensors replaced by `Ref`s; rules take an `OpCall`.

    target
        An overload of torch.ops, such as ``torch.ops.aten.linear.default``.
    inputs, outputs
        Whole tensors, before sharding.
    sequence
        Of an attention that may run on ranks that share a sequence; None: it has no exchange.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    sequence: SharedSequence | None = None

    @cached_property
    def name(self) -> str:
        """The operator's name, such as "aten.linear.default"."""
        return str(self.target)

    @cached_property
    def operator(self) -> str:
        """The operator's bare name, such as "linear"."""
        return self.name.split(".")[1]

    @property
    def declared(self) -> Sequence[Any]:
        """The arguments of the operator's schema. Not cached: they have no copy."""
        schema: Any = getattr(self.target, "_schema")  # noqa: B009 - a callable, for the type checker
        arguments: Sequence[Any] = schema.arguments
        return arguments

    @cached_property
    def by_name(self) -> Mapping[str, Any]:
        """The arguments by name, defaults included."""
        named = {declared.name: declared.default_value for declared in self.declared if declared.has_default_value()}
        named |= {declared.name: value for declared, value in zip(self.declared, self.args, strict=False)}
        return {**named, **self.kwargs}

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Call the operator on these tensors."""
        asked = tuple(self.args), dict(self.kwargs)
        args, kwargs = pytree.tree_map_only(Ref, lambda ref: inputs[ref.index], asked)
        return self.target(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Mark:
    """A strategy that `shard` left on one call. Each mark is equal only to itself.

    function
        The function's name, such as "F.scaled_dot_product_attention".
    strategies
        The pair (in_strategy, out_strategy) as the user wrote it.
    """

    function: str
    strategies: tuple[Any, Any]

    def __str__(self) -> str:
        """Return the call of `shard` that left the mark."""
        return f"shard({self.function})"


@dataclass(frozen=True)
class Node:
    """An input, parameter, buffer or constant, or the call of an operator.

    inputs
        The call's tensors, in the order of its `Ref`s.
    module
        Path of the module that makes the call, such as "layers.0.mlp.up".
    source
        Name of the input, parameter, buffer or constant in the model.
    mark
        The strategy that `shard` left on the function that ran this call.
    """

    name: str
    kind: str
    outputs: tuple[TensorMeta, ...]
    call: OpCall | None = None
    inputs: tuple[Value, ...] = ()
    module: str = ""
    source: str = ""
    mark: Mark | None = None

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The tensors that the node produces."""
        return tuple(Value(self.name, index) for index in range(len(self.outputs)))


@dataclass(frozen=True)
class ParameterRef:
    """Refers to a parameter or buffer by name; a tied parameter by the first of its names."""

    name: str


@dataclass(frozen=True)
class UntracedTensor:
    """Refers to a traced tensor that the graph dropped, because no output depends on the tensor."""

    name: str


@dataclass(frozen=True)
class FunctionCall:
    """A call of one of torch's functions that returned tensors.

    function
        The function that a TorchFunctionMode receives, such as F.linear or torch.Tensor.add.
    arguments, results
        The leaves of (args, kwargs) and of the returned value: `Value`, `ParameterRef` or `UntracedTensor` for tensors.
    changed
        For each result that is an argument written in place: {index among the results: index among the arguments}.
    nodes
        The operators that the call ran, in order.
    moved
        Other tensors that are another value afterwards, by their value before: mse_loss gives its arguments one shape,
        and a write to a view changes the tensor that it is a part of.
    stored, stored_before
        The values that the call gives to parameters and buffers, and those that it reads, from earlier calls: a
        statistic that was written, a weight as flatten(1) returned it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    arguments_spec: pytree.TreeSpec
    results: tuple[Any, ...]
    results_spec: pytree.TreeSpec
    changed: Mapping[int, int]
    nodes: tuple[Node, ...]
    moved: Mapping[Value, Value] = field(default_factory=dict)
    stored: tuple[Value, ...] = ()
    stored_before: tuple[Value, ...] = ()

    @cached_property
    def positional(self) -> int:
        """The number of positional arguments."""
        return len(self.arguments_spec.child(0).children())

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """The names of the keyword arguments."""
        return tuple(self.arguments_spec.child(1).context)

    @cached_property
    def is_flat(self) -> bool:
        """Whether no argument is a list, tuple or dict."""
        nested = (spec for given in self.arguments_spec.children() for spec in given.children())
        return all(spec.is_leaf() for spec in nested)

    @cached_property
    def has_single_result(self) -> bool:
        """Whether the call returned a tensor, not a list or tuple."""
        return self.results_spec.is_leaf()


@dataclass(frozen=True)
class Placed:
    """The placements of a parameter or buffer that `shard_tensor` has marked.

    mesh
        Names and sizes of the mesh dimensions; `placements` has one for each.
    """

    mesh: tuple[tuple[str, int], ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Graph:
    """A model's forward: nodes by name, in an order in which they can run.

    outputs
        The model's return value: `Value`s in their nesting (tuples, lists, dicts).
    updates
        New values of buffers that the forward writes, such as running statistics, by buffer name.
    with_gradient
        Nodes of inputs that required a gradient when traced.
    binding
        The arguments of the traced call; None: the inputs are passed in the order of the nodes.
    training
        Whether the model, or a part of it, was in training mode when traced.
    calls
        The calls of torch's functions that ran the operators, for an eager run; or the reason why they are unknown.
    only_in_python
        Side effects of the forward that the graph leaves out and only an eager run has; "": none.
    placed
        The placements of parameters and buffers that were DTensors when traced, by name; plans keep them.
    blocks
        Modules that did the same as others of a list: {path: path of the first that did the same}, also for the first.
    tied
        The other names of a tied parameter or buffer, by each of its names. Nodes have one of them as their source.
    """

    nodes: Mapping[str, Node]
    outputs: Any
    constants: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, Value] = field(default_factory=dict)
    with_gradient: Set[str] = frozenset()
    binding: Binding | None = None
    training: bool = True
    calls: tuple[FunctionCall, ...] | str = "the graph was not made by trace"
    only_in_python: str = ""
    placed: Mapping[str, Placed] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def meta(self, value: Value) -> TensorMeta:
        """Return the shape and dtype of a tensor."""
        return self.nodes[value.node].outputs[value.index]

    def of_kind(self, *kinds: str) -> list[Node]:
        """Return the nodes of these kinds, in order."""
        return [node for node in self.nodes.values() if node.kind in kinds]

    @property
    def inputs(self) -> list[Node]:
        """Return the nodes of the model's inputs, in order."""
        return self.of_kind(INPUT)

    def computed_from(self, kind: str) -> set[str]:
        """Return the nodes of a kind, and those that depend on them."""
        found: set[str] = set()
        for name, node in self.nodes.items():
            if node.kind == kind or any(value.node in found for value in node.inputs):
                found.add(name)
        return found

    @property
    def returned(self) -> list[Value]:
        """Return the tensors among the model's outputs, in order."""
        return [leaf for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, Value)]

    @property
    def kept(self) -> set[Value]:
        """Return the tensors that are needed after all operators have run: outputs and new values of buffers."""
        return {*self.returned, *self.updates.values()}

    def needed_for(self, values: Iterable[Value]) -> set[str]:
        """Return the names of the nodes that these tensors are computed from, with those that make them."""
        found, waiting = set[str](), [value.node for value in values]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [value.node for value in self.nodes[name].inputs]
        return found

    def readers(self) -> dict[Value, list[tuple[str, int]]]:
        """Return, for every tensor, its readers as (node name, index of the tensor among the node's inputs)."""
        readers: dict[Value, list[tuple[str, int]]] = {}
        for node in self.nodes.values():
            readers |= {value: [] for value in node.values}
            for index, value in enumerate(node.inputs):
                readers[value].append((node.name, index))
        return readers
