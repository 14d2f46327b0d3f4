"""A model's forward as a list of operators: what strategies are chosen for, and what a rank runs its part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.arguments import Binding
from ascend_parallel.sharding.layout import Shape

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


@dataclass(frozen=True)
class Ref:
    """Stands in a call's arguments for the node's `index`-th tensor input."""

    index: int


@dataclass(frozen=True)
class Value:
    """A tensor: the `index`-th output of the node of that name."""

    node: str
    index: int = 0


@dataclass(frozen=True)
class OpCall:
    """An operator and its arguments, tensors replaced by `Ref`s: what a rule is asked about.

    target
        An overload of torch.ops, such as ``torch.ops.aten.linear.default``.
    inputs, outputs
        Whole tensors, before sharding.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]

    @property
    def name(self) -> str:
        """The operator's name, such as "aten.linear.default"."""
        return str(self.target)


@dataclass(frozen=True, eq=False)
class Mark:
    """A strategy left on one call, and equal to itself alone.

    function
        The function's name, such as "F.scaled_dot_product_attention".
    strategies
        The pair (in_strategy, out_strategy) as it was given.
    """

    function: str
    strategies: tuple[Any, Any]

    def __str__(self) -> str:
        """Return who left it."""
        return f"shard({self.function})"


@dataclass(frozen=True)
class Node:
    """A tensor that is given (input, parameter, buffer, constant) or an operator's call.

    inputs
        The call's tensors, in the order of its `Ref`s.
    module
        Path of the module it was called in, such as "layers.0.mlp.up".
    source
        Name of the input, parameter, buffer or constant in the model.
    mark
        The strategy that `shard` left on the call of a function that ran it.
    """

    name: str
    kind: str
    outputs: tuple[TensorMeta, ...]
    call: OpCall | None = None
    inputs: tuple[Value, ...] = ()
    module: str = ""
    source: str = ""
    mark: Mark | None = None


@dataclass(frozen=True)
class Held:
    """Stands for a parameter or buffer; of a tied one's names the first."""

    name: str


@dataclass(frozen=True)
class UntracedTensor:
    """Stands for a tensor that nothing of the graph is made of."""

    name: str


@dataclass(frozen=True)
class FunctionCall:
    """A call of one of torch's functions that gave tensors.

    function
        What a TorchFunctionMode is told, such as F.linear or torch.Tensor.add.
    arguments, results
        The leaves of (args, kwargs) and of what it returned: `Value`, `Held` or `UntracedTensor` for tensors.
    changed
        For results that are an argument to which the call wrote: the argument's place, by the result's.
    nodes
        The operators that it ran, in their order.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    arguments_spec: pytree.TreeSpec
    results: tuple[Any, ...]
    results_spec: pytree.TreeSpec
    changed: Mapping[int, int]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run, by name.

    outputs
        What the model returns: `Value`s in the nesting (tuples, lists, dicts) that it returns them in.
    updates
        New values of buffers that the forward writes, by their name: running statistics.
    with_gradient
        Nodes of inputs that were traced with a gradient.
    binding
        How the model was called; None: its inputs in the order of the nodes.
    training
        Whether the model, or a part of it, was in training mode when it was traced.
    calls
        The calls of torch's functions that ran the operators, for an eager run; or why there is none.
    only_in_python
        What the forward does that the graph leaves out, which only an eager run does too; "": nothing.
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

    def meta(self, value: Value) -> TensorMeta:
        """Return shape and dtype of a tensor."""
        return self.nodes[value.node].outputs[value.index]

    @property
    def kept(self) -> set[Value]:
        """Return what is still needed when all operators have run: outputs and new values of buffers."""
        leaves = pytree.tree_leaves(self.outputs, is_leaf=lambda leaf: isinstance(leaf, Value))
        return {leaf for leaf in leaves if isinstance(leaf, Value)} | set(self.updates.values())

    def last_reads(self) -> dict[str, list[Value]]:
        """Return, by node, the tensors that nobody needs after it."""
        found: dict[str, list[Value]] = {}
        kept = self.kept
        for value, readers in self.readers().items():
            if value not in kept:
                found.setdefault(readers[-1][0] if readers else value.node, []).append(value)
        return found

    def readers(self) -> dict[Value, list[tuple[str, int]]]:
        """Return, for every tensor, the nodes that read it and as which of their inputs."""
        found: dict[Value, list[tuple[str, int]]] = {}
        for node in self.nodes.values():
            found |= {Value(node.name, index): [] for index in range(len(node.outputs))}
            for index, value in enumerate(node.inputs):
                found[value].append((node.name, index))
        return found
