"""In-place operators of an exported program as the operators that do the same out of place.

A graph's values do not change. Where what an operator writes to is seen under no other name, the program's own order
and names can stay: the operator is replaced. Everything else is for torch's functionalization (run_decompositions).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

BATCH_NORM = torch.ops.aten.batch_norm.default
FUNCTIONAL_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
# Made of other operators, and always of memory of its own.
FRESH = [
    "linear",
    "matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "max_pool2d",
    "lift_fresh_copy",
]


@dataclass(frozen=True)
class Form:
    """An operator that stands for another.

    value
        What it gives: fake tensors.
    updates
        The index of its output that is a buffer's new value, by the buffer's name.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    updates: Mapping[str, int] = field(default_factory=dict)


def is_in_place(node: torch.fx.Node) -> bool:
    """Tell whether an operator writes to what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functional_forms(program: ExportedProgram) -> dict[str, Form] | None:
    """Return what stands for each operator that writes, by its name; None: that cannot be told here."""
    found = {}
    seen = _Seen(program)
    for node in program.graph.nodes:
        if is_in_place(node):
            form = seen.out_of_place(node)
        elif node.target is BATCH_NORM and node.args[5] and node.args[3] is not None:
            form = seen.batch_norm(node)
        else:
            continue
        if form is None:
            return None
        found[node.name] = form
    return found


class _Seen:
    """Which nodes see the same memory, and in which order they run."""

    def __init__(self, program: ExportedProgram) -> None:
        self._buffers = program.graph_signature.inputs_to_buffers
        self._order = {node: place for place, node in enumerate(program.graph.nodes)}
        self._sharing: dict[int, list[torch.fx.Node]] = defaultdict(list)
        for node in program.graph.nodes:
            if node.target is not operator.getitem:
                for key in dict.fromkeys(map(_memory, _tensors(node))):
                    self._sharing[key].append(node)

    def out_of_place(self, node: torch.fx.Node) -> Form | None:
        """Return the form of an operator that writes to its first argument, and returns that."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        written = [one for one in target._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        other = _named(target)
        if other is None or len(written) != 1 or written[0] != target._schema.arguments[0]:
            return None
        root = self._root(node)
        if root is None:
            return None
        updates = {self._buffers[root.name]: 0} if root.name in self._buffers else {}
        return Form(other, tuple(node.args), node.kwargs, node.meta["val"], updates)

    def batch_norm(self, node: torch.fx.Node) -> Form | None:
        """Return the form of a batch norm that updates its running statistics."""
        x, weight, bias, mean, variance, training, momentum, eps, _ = node.args
        for one in (mean, variance):
            assert isinstance(one, torch.fx.Node)
            alone = self._sharing[_memory(one.meta["val"])] == [one]
            if one.name not in self._buffers or not alone or self._later(one, node):
                return None
        args = (x, weight, bias, mean, variance, training, momentum, eps)
        fakes = pytree.tree_map_only(torch.fx.Node, lambda one: one.meta["val"], args)
        value = FUNCTIONAL_BATCH_NORM(*fakes)
        updates = {self._buffers[str(one)]: index for index, one in ((3, mean), (4, variance))}
        return Form(FUNCTIONAL_BATCH_NORM, args, {}, value, updates)

    def _root(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """Return who made what the node writes to, if until the last writes nobody else can see it."""
        sharing = self._sharing[_memory(node.meta["val"])]
        writes = [place for place, one in enumerate(sharing) if is_in_place(one)]
        chain, root = sharing[: writes[-1] + 1], sharing[0]
        if writes != list(range(1, len(chain))) or (root.op == "placeholder" and root.name not in self._buffers):
            return None
        for before, after in pairwise(chain):
            others = [one for one in before.users if one is not after]
            if after.args[0] is not before or self._later(before, after) or not all(map(_is_fresh, others)):
                return None
        return root if root.op == "placeholder" or _is_fresh(root) else None

    def _later(self, read: torch.fx.Node, node: torch.fx.Node) -> bool:
        """Tell whether `read` is read after the node."""
        return any(self._order[one] > self._order[node] for one in read.users)


def _named(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload of the same name without the underscore, if it takes the same."""
    packet = getattr(getattr(torch.ops, target.namespace), target._opname.removesuffix("_"), None)
    other = getattr(packet, target._overloadname, None)
    if other is None or other is target or other._schema.is_mutable:
        return None
    names = [[one.name for one in overload._schema.arguments] for overload in (target, other)]
    return other if names[0] == names[1] else None


def _is_fresh(node: torch.fx.Node) -> bool:
    """Tell whether what an operator gives is surely no other name of what it reads."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target.name())  # type: ignore[no-untyped-call]
    if any(one.alias_info is not None for one in node.target._schema.returns):
        return False
    # others may return what they were given, and no schema tells: dropout in evaluation
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return node.target._overloadpacket.__name__ in FRESH or not composite


def _tensors(node: torch.fx.Node) -> Sequence[torch.Tensor]:
    return [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
